"""What ``distembed convert`` does: finds the source, the config and the dataset, and writes the start of a run."""

from collections.abc import Sequence
from pathlib import Path

import torch

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.manifest import Manifest
from distembed.serving.convert.run_source import RunAsStock
from distembed.serving.convert.run_start import convert_to_run
from distembed.serving.convert.tables import FitError
from distembed.training.build import Blueprint
from distembed.training.config import load_config
from distembed.training.run_folder.folder import holds_run
from distembed.training.trained_run import find_trained_run


def convert(
    source: Path, config_file: Path | None, overrides: Sequence[str], output: Path, names: Sequence[str] = ()
) -> list[FitError]:
    """Converts a run, or a stock model's checkpoint, into a run that training begins with.

    Args:
        source: The folder of a run, or a stock checkpoint.
        config_file: The config of the run that begins with it; unless given, that of the run that is converted.
        overrides: Settings that replace the config's, as ``dotted.key=value``.
        output: The folder to make.
        names: ``OURS=THEIRS`` each: what a stock model calls modules that have other names there.

    Raises:
        UserError: The source, the config or a name cannot be used; or as for
            :func:`distembed.serving.convert.run_start.convert_to_run`.
        RunError: The checkpoint cannot be written.
    """
    renamed = dict(_pair(text) for text in names)
    if not holds_run(source):
        if config_file is None:
            raise UserError(
                f"{source} is no run, so it is taken for the checkpoint of a stock model; say with --config which "
                "model its weights go into."
            )
        config = load_config(config_file, list(overrides))
        dataset = config.data.require_path()
        return convert_to_run(source, config, dataset, Manifest.load(dataset), output, renamed)
    if renamed:
        raise UserError("--name is for checkpoints of stock models; a run's modules have the same names.")
    run = find_trained_run(source, None)
    config = load_config(config_file or source / "config.yaml", list(overrides))
    own = config.data.require_path()
    # what the run keeps of its dataset is enough, but the folder is easier to use with the dataset itself
    dataset, manifest = (own, Manifest.load(own)) if Path(own).exists() else (run.dataset, run.manifest)
    blueprint = Blueprint.for_ranks(run.config, run.manifest.schema, Ranks(0, 1, 1, torch.device("cpu")), {})
    return convert_to_run(RunAsStock(source, run.config, blueprint), config, dataset, manifest, output)


def _pair(text: str) -> tuple[str, str]:
    """Returns both names of ``OURS=THEIRS``.

    Raises:
        UserError: There are not two.
    """
    ours, equals, theirs = text.partition("=")
    if not (ours and equals and theirs):
        raise UserError(f"--name is {text!r}; give OURS=THEIRS, such as embeddings=sparse_arch.ebc.")
    return ours, theirs
