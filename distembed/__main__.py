"""``python -m distembed``, which is what ``torch.distributed.run`` starts."""

from distembed.cli import main

main()
