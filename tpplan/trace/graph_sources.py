"""The sources of a graph: inputs, parameters and buffers of a recorded program, by the names that the model has."""

from torch import nn

from tpplan.core.graph import Source, SourceKind
from tpplan.experts.expert_share import share_of
from tpplan.trace.record_fx import Placeholder


class ModelSources:
    """The sources of a model's graphs, by the names of its parameters and buffers; of tied names the first counts."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.names: dict[int, list[str]] = {id(parameter): [] for parameter in model.parameters()}
        for label, parameter in self.parameters.items():
            self.names[id(parameter)].append(label)

    def source(self, given: Placeholder) -> Source:
        """The source that a placeholder stands for, with `kind:label` as the name of its value."""
        label = given.label.removeprefix("model.")
        if given.kind is SourceKind.PARAMETER:
            return self._parameter(label)
        if given.kind is SourceKind.BUFFER:
            return self._buffer(label)
        return Source(kind=given.kind, result=f"{given.kind}:{given.label}", label=given.label)

    def _parameter(self, label: str) -> Source:
        parameter = self.parameters[label]
        first, *others = self.names[id(parameter)]
        share = share_of(self.modules[first.rpartition(".")[0]])
        return Source(
            kind=SourceKind.PARAMETER,
            result=f"{SourceKind.PARAMETER}:{first}",
            label=first,
            aliases=tuple(others),
            trainable=parameter.requires_grad,
            ep=share.ep if share is not None else 1,
        )

    def _buffer(self, label: str) -> Source:
        own = self.buffers.get(label)  # None where forward has deleted it
        aliases = tuple(name for name, buffer in self.buffers.items() if buffer is own and name != label)
        return Source(kind=SourceKind.BUFFER, result=f"{SourceKind.BUFFER}:{label}", label=label, aliases=aliases)
