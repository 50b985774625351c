"""``python -m distembed``, which is what ``torch.distributed.run`` starts."""

from distembed.commands.cli import main

main()
