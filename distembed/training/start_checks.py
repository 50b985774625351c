"""What a run needs and might find out only hours later: all splits whole, and room for checkpoints."""

from collections.abc import Mapping

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.verification import require_whole
from distembed.errors import UserError


def require_splits(dataset: str, splits: Mapping[str, str | None]) -> None:
    """Makes sure that every split that is going to be read is there, and that its files are whole.

    Args:
        dataset: The dataset's folder.
        splits: The split by the setting or option that names it; None where it names none.

    Raises:
        UserError: A split is missing, or one of its files is missing, cut short or damaged.
    """
    known = Manifest.load(dataset).splits
    for setting, name in splits.items():
        if name is not None and name not in known:
            optional = ", or to null for none" if setting in ("data.validation", "data.test") else ""
            raise UserError(
                f"{setting} is {name!r}, but the dataset {dataset} has no split of that name; it has "
                f"{', '.join(known) or 'none'}. Set it to one of them{optional}."
            )
    require_whole(dataset, dict.fromkeys(name for name in splits.values() if name is not None))
