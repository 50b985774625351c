"""A session model in the manner of GRU4Rec (Hidasi et al., ICLR 2016): a GRU over a user's items predicts the next one.

On the CPU rows of unequal length are packed step by step, as torch's ``PackedSequence`` has them, without padding.
"""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from distembed.models.layers import Dropout, make_linear
from distembed.models.sequences import QueriedRows, SequenceLayout, lay_out, pack, take_queries, take_tokens


class RecurrentStates(nn.Module):
    """Maps vectors of tokens to states at the queries of each row by a GRU, and a linear layer back to D numbers.

    Args:
        dim: Dimension D of a vector.
        hidden: Dimension of the GRU's state.
        max_length: Most tokens of a row; older ones are left out.
        num_layers: Number of layers of the GRU.
        dropout: Share of numbers that are dropped in training, of the vectors and between layers.
    """

    def __init__(self, dim: int, hidden: int, max_length: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.max_length = max_length
        self.drop = Dropout(dropout)
        self.gru = nn.GRU(dim, hidden, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0)
        self.output = make_linear(hidden, dim)

    def forward(self, tokens: Float[Tensor, "tokens dim"], queried: QueriedRows) -> Float[Tensor, "queries dim"]:
        """Returns the state at each query, zeros where its row has no token."""
        vectors = self.drop(tokens)
        if tokens.device.type == "cpu":
            packed = pack(queried, self.max_length)
            sequence = PackedSequence(take_tokens(vectors, packed.tokens), packed.batch_sizes)
            return take_queries(self.output(self.gru(sequence)[0].data), packed.queries)
        layout = lay_out(queried, self.max_length)
        return self.on_slots(take_tokens(vectors, layout.tokens), layout)

    def on_slots(self, vectors: Float[Tensor, "slots dim"], layout: SequenceLayout) -> Float[Tensor, "queries dim"]:
        """Returns the state at each query from the vectors of slots that form one group."""
        ((num_rows, length),) = layout.groups
        padded = vectors.view(num_rows, length, vectors.shape[1])
        return take_queries(self.output(self.gru(padded)[0]).flatten(0, 1), layout.queries)
