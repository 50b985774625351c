"""The states of tables' partitions in a module's state dict, as ``<table>__<state>``.

Training changes the rows of ids in a table of the partition ``clustered``. The weights mean nothing without these rows,
so a state dict holds both. Every rank has the whole state, as a plain tensor on the CPU.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distembed.embedding.config import CompositionalEmbeddingConfig


class HasPartitionState:
    """First base of modules with compositional tables; puts the states of their partitions into the state dict."""

    @abstractmethod
    def tables(self) -> Sequence[CompositionalEmbeddingConfig]:
        """Returns the compositional tables, in order."""

    def partition_state_changed(self) -> None:
        """Drops everything that follows from the states of partitions and from identities, which were overwritten."""
        for table in self.tables():
            table.scheme.state_changed()
            if table.managed is not None:
                table.managed.state_changed()

    # not torch's hooks: DistributedModelParallel calls these methods of modules that it does not shard
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for table in self.tables():
            destination.update({f"{prefix}{name}": value for name, value in partition_states(table).items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for table in self.tables():
            live = {f"{prefix}{name}": value for name, value in partition_states(table).items()}
            unexpected_keys[:] = [key for key in unexpected_keys if key not in live]
            differing = [key for key in live if key in state_dict and state_dict[key].shape != live[key].shape]
            error_msgs += [
                f"size mismatch for {key}: the shape is {tuple(state_dict[key].shape)}, and in this model "
                f"{tuple(live[key].shape)}; give table {table.name!r} the partition settings of the saved model."
                for key in differing
            ]
            if strict:
                missing_keys += [key for key in live if key not in state_dict]
            if not differing and all(key in state_dict for key in live):
                for key, value in live.items():
                    value.copy_(state_dict[key])
        self.partition_state_changed()


def partition_states(table: CompositionalEmbeddingConfig) -> dict[str, Tensor]:
    """Returns the live states of a table's partitions by their names in its collection's state dict."""
    return {f"{table.name}__{name}": value for name, value in table.scheme.state.items()}
