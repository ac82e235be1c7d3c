"""PyTorch Geometric: graph networks over one graph."""

from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, GPSConv, GraphSAGE, SAGEConv

from libraries_parts.case import Case, Inputs, drawn, squares, tokens

NODES, EDGES, FEATURES, HIDDEN, HEADS = 24, 96, 16, 32, 4


def graph(batch: int, seq_len: int) -> Inputs:
    """Features of nodes, and which are joined."""
    return {"x": drawn(NODES, FEATURES), "edge_index": tokens(2, EDGES, below=NODES)}


class GraphTransformer(nn.Module):
    """Layers of message passing beside attention of all nodes to all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, HIDDEN)
        self.layers = nn.ModuleList(
            GPSConv(HIDDEN, SAGEConv(HIDDEN, HIDDEN), heads=HEADS, norm="layer_norm") for _ in range(2)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """x [nodes, features] -> [nodes, hidden]."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


MODELS = {
    "gcn": Case(build_model=lambda: GCN(FEATURES, HIDDEN, 2), example_inputs=graph, loss=squares),
    "gat": Case(build_model=lambda: GAT(FEATURES, HIDDEN, 2, heads=HEADS), example_inputs=graph, loss=squares),
    "sage": Case(build_model=lambda: GraphSAGE(FEATURES, HIDDEN, 2), example_inputs=graph, loss=squares),
    "gin": Case(build_model=lambda: GIN(FEATURES, HIDDEN, 2), example_inputs=graph, loss=squares),
    "gps": Case(build_model=GraphTransformer, example_inputs=graph, loss=squares, heads=HEADS),
}
