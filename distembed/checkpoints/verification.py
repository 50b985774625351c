"""Whether a checkpoint is whole, byte for byte."""

import io

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from distembed.base.checksums import Verification
from distembed.base.errors import DamagedCheckpoint
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.store import LAST_FILE, METADATA_FILE, open_file_system
from distembed.checkpoints.transfer import not_read
from distembed.checkpoints.verified_files import DamagedFile, read_block


def verify_checkpoint(checkpoint: str) -> Verification:
    """Holds every block of every file of a checkpoint against its checksum; of early versions, it is only decoded.

    Args:
        checkpoint: Local path or URL of the checkpoint.

    Returns:
        All problems, not only the first.

    Raises:
        UserError: The checkpoint cannot be reached.
    """
    try:
        saved = SavedCheckpoint.read(checkpoint)
    except DamagedCheckpoint as damage:
        return Verification([str(damage)], num_files=1)
    files, path = open_file_system(checkpoint)
    found = Verification(has_checksums=saved.has_checksums)
    found.num_files = 2
    found.num_bytes = sum(files.size(f"{path}/{name}") for name in (LAST_FILE, METADATA_FILE))
    blocks: dict[str, list[_StorageInfo]] = {}
    for info in saved.metadata.storage_data.values():
        blocks.setdefault(info.relative_path, []).append(info)
    for name in sorted(blocks):
        found.num_files += 1
        try:
            with files.open(f"{path}/{name}", "rb") as file:
                for info in sorted(blocks[name], key=lambda info: info.offset):
                    try:
                        block = read_block(file, info)
                        found.num_bytes += len(block)
                        if not saved.has_checksums:
                            _require_readable(block, info)
                    except DamagedFile as damage:
                        found.problems.append(f"{checkpoint}: {damage}.")
        except Exception as error:  # file systems raise errors of their own kinds
            found.problems.append(str(not_read(f"{checkpoint}/{name}", error)))
    return found


def _require_readable(block: bytes, info: _StorageInfo) -> None:
    """Makes sure that a block without a checksum is a tensor, without executing anything."""
    try:
        torch.load(io.BytesIO(block), weights_only=True)
    except Exception as error:  # a damaged block may fail in any way
        raise DamagedFile(f"{info.relative_path} holds something else than a tensor at byte {info.offset:,}") from error
