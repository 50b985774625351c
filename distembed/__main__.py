"""``python -m distembed``, which ``torch.distributed.run`` starts."""

from distembed.commands.cli import main

main()
