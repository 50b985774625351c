"""Takes the weights and optimizer states of an earlier run over into a live model whose tables may have grown."""

import dataclasses

from distembed.base.ranks import Collectives
from distembed.checkpoints.grown import load_grown
from distembed.training.build import Blueprint, TrainingState
from distembed.training.initial_run import InitialRun
from distembed.training.task_model import TaskModel


def take_over(initial: InitialRun, blueprint: Blueprint, state: TrainingState) -> int:
    """Reads the checkpoint of an earlier run into a live model; all ranks call it.

    Known rows of tables have the numbers that they had, with their optimizer states; new rows have those of a fresh
    start. The states of Adam and its kin go on with the number of steps that they have gathered, which corrects them:
    for a new row that is as if it had not occurred in a batch before.

    Args:
        initial: The earlier run.
        blueprint: What the live model was built from.
        state: The live model and its optimizers.

    Returns:
        The number of steps that the optimizers' states have gathered.

    Raises:
        UserError: The checkpoint is of another model or of other optimizers, or cannot be reached.
        DamagedCheckpoint: It is damaged.
    """
    earlier = dataclasses.replace(blueprint, config=initial.config, schema=initial.schema, sse={})
    before = TaskModel(earlier.build_unsharded(), earlier.task, blueprint.world_size, blueprint.device, blueprint.bf16)
    return load_grown(initial.checkpoint, before, state.model, state.optimizers.combined, Collectives())
