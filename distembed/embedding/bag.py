"""A compositional table as a plain ``torch.nn.Module``, for models that do not use TorchRec."""

from typing import NoReturn

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.tracing import is_proxy, is_traced, one_node, require_in_program
from distembed.composition import Composition
from distembed.embedding.batches import require_integers
from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.embedding.ids import map_ids
from distembed.embedding.settings import IdPolicy, Pooling
from distembed.embedding.tables import empty_weight, initialise, refuse_torchscript
from distembed.partitions import KeyedHash, Partition


class CompositionalEmbeddingBag(nn.Module):
    """Replaces ``nn.EmbeddingBag``: it is constructed and called in the same way, with a partition and a composition.

    It has no max_norm, norm_type, scale_grad_by_freq, padding_idx and from_pretrained. Arguments from ``mode`` on are
    keyword-only. The parameter ``weights.<j>`` holds the vectors, or the functions, of partition j.

    Args:
        num_embeddings: The number of ids; an id lies in ``[0, num_embeddings)``.
        embedding_dim: The dimension of the composed vector. With feature generation the output has a vector for each
            partition, side by side.
        partition: An instance for the same ``num_embeddings``, or a name of ``distembed.partitions.PARTITIONS``.
        composition: An instance, or a name of ``distembed.composition.COMPOSITIONS``.
        mode: The pooling of composed vectors: ``sum``, ``mean`` or ``max``. An empty bag gives zeros.
        include_last_offset: Whether ``offsets`` end with the number of ids.
        sparse: Whether the gradients of the partitions that hold vectors are sparse tensors.
        id_policy: How to treat an id outside of ``[0, num_embeddings)``: ``error``, ``clip_to_oov`` or ``modulo``.
        oov_id: The id by which ``clip_to_oov`` replaces it; 1 unless given.
        pre_hash: A hash that is applied to every id first.
        seed: The seed of the initial weights; drawn from torch's generator unless given.
        device: The device of the weights; torch's default device unless given.
        dtype: The dtype of the weights; torch's default dtype unless given.

    Raises:
        UserError: A name is unknown, a size is below 1, or the partition was made for another number of ids.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        partition: Partition | str = "quotient_remainder",
        composition: Composition | str = "product",
        *,
        mode: Pooling = "mean",
        include_last_offset: bool = False,
        sparse: bool = False,
        id_policy: IdPolicy = "error",
        oov_id: int | None = None,
        pre_hash: KeyedHash | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # a table of one feature does the work: this module holds its weights and calls it
        self.table = CompositionalEmbeddingBagConfig(
            name=type(self).__name__,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            feature_names=["input"],
            partition=partition,
            composition=composition,
            pooling=mode,
            seed=int(torch.randint(2**62, ())) if seed is None else seed,
            id_policy=id_policy,
            oov_id=oov_id,
            pre_hash=pre_hash,
        )
        self.include_last_offset = include_last_offset
        self.sparse = sparse
        device, dtype = torch.device(device or torch.get_default_device()), dtype or torch.get_default_dtype()
        self.weights = nn.ParameterList(empty_weight(part, device, dtype) for part in self.table.partition_tables())
        self.reset_parameters()

    @property
    def num_embeddings(self) -> int:
        """The number of ids."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """The dimension of a composed vector."""
        return self.table.embedding_dim

    @property
    def mode(self) -> Pooling:
        """The pooling of a bag's vectors."""
        return self.table.pooling

    def reset_parameters(self) -> None:
        """Fills all weights with their initial values again; it does nothing on the meta device."""
        initialise(self.table.partition_tables(), self.weights)

    def forward(
        self,
        input: Int[Tensor, " ids"] | Int[Tensor, "batch bag"],
        offsets: Int[Tensor, " batch"] | None = None,
        per_sample_weights: Float[Tensor, " ids"] | Float[Tensor, "batch bag"] | None = None,
    ) -> Float[Tensor, "batch width"]:
        """Composes each id's vector, multiplies it by its weight if weights are given, and pools the vectors of a bag.

        Args:
            input: The ids, with a row for each bag, or bag after bag with ``offsets``.
            offsets: The position at which each bag begins.
            per_sample_weights: A weight for each id, in the shape of ``input``; not allowed with mode ``max``.

        Raises:
            UserError: An id lies outside of the table and the policy is ``error``, ids or offsets are no integers,
                shapes do not match, offsets do not divide the ids into bags, or mode is ``max`` and weights are given.
        """
        if is_proxy(input, offsets, per_sample_weights):
            return one_node(self, input, offsets, per_sample_weights)
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise UserError(
                f"per_sample_weights has the shape {tuple(per_sample_weights.shape)} and input {tuple(input.shape)}; "
                "give a weight for each id."
            )
        lengths = _bag_lengths(input, offsets, self.include_last_offset)
        ids = map_ids(self.table, input.flatten(), "input")
        weights = None if per_sample_weights is None else per_sample_weights.flatten()
        return pool(self._embed(ids), lengths, self.table.pooling, weights)

    def _embed(self, ids: Int64[Tensor, " ids"]) -> Float[Tensor, "ids width"]:
        """Returns the composed vector of each id."""
        rows, weights = self.table.scheme.rows(ids), list(self.weights)
        if self.sparse:
            # only nn.functional.embedding makes sparse gradients: it looks up, and id i has row i of its output
            n = len(self.table.lookup_tables())
            vectors = [nn.functional.embedding(rows[j], weights[j], sparse=True) for j in range(n)]
            order = torch.arange(len(ids), device=ids.device).expand(n, -1)
            rows, weights = torch.cat([order, rows[n:]]), vectors + weights[n:]
        return self.table.combine.embed(weights, rows).to(self.weights[0].dtype)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses ``torch.jit.script``, which calls this first."""
        refuse_torchscript(self)

    def extra_repr(self) -> str:
        """Returns the module's settings, for its ``repr``."""
        table = self.table
        return (
            f"{table.num_embeddings}, {table.embedding_dim}, partition={table.scheme!r}, "
            f"composition={table.combine.name!r}, mode={table.pooling!r}, id_policy={table.id_policy!r}"
        )


@torch.fx.wrap
def pool(vectors: Tensor, lengths: Tensor, pooling: str, weights: Tensor | None = None) -> Tensor:
    """Pools vectors that lie bag after bag; an empty bag gives zeros.

    ::

        ids       7  4  7     9        bags of 2, 0, 1 and 1 ids
        lengths   2     0  1  1
        vectors   a  b  c     d   ->   sum [a + b, 0, c, d]

    A trace of torch.fx holds it as one step. Annotations have no shapes: TorchScript compiles it for quantised tables.

    Args:
        vectors: The composed vector of each id, float [ids, width].
        lengths: The number of ids of each bag, integers [batch]; their sum is the number of ids.
        pooling: ``sum``; ``mean``, the (weighted) sum divided by the number of ids, as in FBGEMM; or ``max``,
            elementwise, which refuses weights by a UserError.
        weights: Factor for each id's vector, float [ids].

    Returns:
        The vector of each bag, float [batch, width].
    """
    if weights is not None:
        if pooling == "max":
            raise UserError("pooling max goes with no per-sample weights; use sum or mean, or give none.")
        vectors = vectors * weights.to(vectors.dtype).unsqueeze(1)
    if pooling == "max":
        return _max(vectors, lengths)
    # faster forward and backward than an embedding_bag over the vectors, or a segment_reduce of them
    bags = torch.arange(lengths.shape[0], device=lengths.device)
    bag_per_id = bags.repeat_interleave(lengths, output_size=vectors.shape[0])
    summed = vectors.new_zeros(lengths.shape[0], vectors.shape[1]).index_add(0, bag_per_id, vectors)
    return summed / lengths.clamp(min=1).unsqueeze(1) if pooling == "mean" else summed


def _max(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Returns the elementwise maximum of each bag, by an ``embedding_bag`` over the vectors in their own order."""
    offsets = nn.functional.pad(lengths.long().cumsum(0), [1, 0])
    order = torch.arange(vectors.shape[0], device=vectors.device)
    return nn.functional.embedding_bag(order, vectors, offsets, mode="max", include_last_offset=True)


def _bag_lengths(
    input: Int[Tensor, "*shape"], offsets: Int[Tensor, " offsets"] | None, include_last_offset: bool
) -> Int64[Tensor, " batch"]:
    """Returns the number of ids of each bag; raises a UserError unless shapes and offsets give every id one bag."""
    if input.dim() == 2:
        if offsets is not None:
            raise UserError("input has two dimensions, a row a bag, and offsets are given too; leave offsets out.")
        return torch.full((len(input),), input.shape[1], device=input.device)
    if input.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise UserError(
            f"input has the shape {tuple(input.shape)} and offsets "
            f"{None if offsets is None else tuple(offsets.shape)}; give ids of two dimensions, a row a bag, or of one "
            "with offsets of one."
        )
    require_integers("offsets", offsets.dtype)
    bounds = offsets if include_last_offset else torch.cat([offsets, offsets.new_full((1,), input.numel())])
    lengths = bounds.long().diff()
    _require_bags(bounds, lengths, input.numel())
    return lengths


def _require_bags(bounds: Tensor, lengths: Tensor, num_ids: int) -> None:
    """Raises unless ``bounds`` (starts and last end) rise from 0 to ``num_ids``; on a GPU the check is asynchronous."""
    if len(bounds) == 0 or (len(lengths) == 0 and num_ids > 0):
        raise UserError(f"offsets has the shape {tuple(bounds.shape)} and there are {num_ids} ids; give each a bag.")
    is_whole = (bounds[0] == 0) & (bounds[-1] == num_ids) & (lengths >= 0).all()
    if is_traced():
        require_in_program(is_whole, "offsets do not divide the ids into bags; run the batch uncompiled to see why")
    elif bounds.device.type != "cpu":
        torch._assert_async(is_whole, "offsets do not divide the ids into bags; run the batch on the CPU to see why")
    elif not is_whole:
        raise UserError(
            f"offsets begin with {int(bounds[0])} and bags end at {int(bounds[-1])}, for {num_ids} ids; offsets begin "
            "with 0, never fall, and do not exceed the number of ids; with include_last_offset the last one is it."
        )
