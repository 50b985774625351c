"""What a run says of its start beside the number of steps: initial weights, the plan, replaced ids."""

from collections.abc import Iterator

from distembed.planning import describe_plan
from distembed.tasks.seen_items import describe_seen_items
from distembed.training.build import TrainingState
from distembed.training.start import RunStart


def start_lines(start: RunStart, state: TrainingState) -> Iterator[str]:
    """Yields the lines that rank 0 prints before the first step."""
    if start.initial is not None:
        yield f"weights and optimizer states are those of {start.initial.checkpoint}"
    yield f"plan: {describe_plan(state.plan)}"
    changed = start.plans.reasons_to_replan(state.plan_inputs)
    if changed:
        yield f"planned anew, since the run's plan was made for something else: {'; '.join(changed)}"
    if start.sse:
        rates = sorted({rule.p0 for rule in start.sse.values()})
        yield f"ids replaced: {len(start.sse)} tables, p0 {', '.join(map(str, rates))}"
    if start.seen_items is not None:
        yield describe_seen_items(start.seen_items)
    yield from state.task.start_lines()
