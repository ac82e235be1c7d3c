"""Copies the nodes of a traced layer for a sibling that must give the same graph, under the sibling's names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpplan.core.graph import ALIAS, Boundary, Op, Ref, Source, Value, within
from tpplan.layouts.rules import base_target


class NotAlikeError(Exception):
    """A sibling is not like the layer that was traced for it.

    `classes` gives layers a class by name: layers of one class did the same, and so did those that are not listed.
    Where it is empty, every layer must be traced.
    """

    def __init__(self, message: str, classes: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.classes = dict(classes or {})


@dataclass(frozen=True, slots=True)
class Given:
    """The sources as a traced layer sees them: `own` are its own, as (value, label after the layer's name), `outside`
    the values of all others, `labels` the value of each label; `count` is the number of all."""

    own: list[tuple[str, str]]
    outside: dict[str, None]
    labels: dict[str, str]
    count: int

    @classmethod
    def of(cls, layer: str, sources: Sequence[Source]) -> "Given":
        """The sources as the layer of this name sees them."""
        own = [source for source in sources if source.label.startswith(layer + ".")]
        inside = {source.result for source in own}
        return cls(
            own=[(source.result, source.label.removeprefix(layer)) for source in own],
            outside={source.result: None for source in sources if source.result not in inside},
            labels={label: source.result for source in sources for label in (source.label, *source.aliases)},
            count=len(sources),
        )


class LayerImages:
    """Maps values of a traced layer's forward (`like`) to values of its sibling's (`module`).

    values and lines are those of the graph, and grow. fresh gives a name that no value has, first_name the name under
    which a module is planned.
    """

    def __init__(
        self,
        given: Given,
        values: dict[str, Value],
        lines: dict[str, str],
        fresh: Callable[[str], str],
        first_name: Callable[[str], str],
        *,
        like: str,
        module: str,
    ) -> None:
        self.values = values
        self.lines = lines
        self.fresh = fresh
        self.first_name = first_name
        self.like = like
        self.module = module
        self.made: set[str] = set()
        #: sources outside of the layer, which are their own images where they are no arguments
        self._outside = given.outside
        self._images = {result: given.labels[module + below] for result, below in given.own}

    def bind(self, original: str, image: str) -> None:
        """Maps an input of the traced layer to one of the sibling. Raises NotAlikeError where the two differ."""
        first, second = self.values[original], self.values[image]
        if (first.shape, first.dtype, first.carries_gradient) != (second.shape, second.dtype, second.carries_gradient):
            raise NotAlikeError(f"{self.module} is given other tensors than {self.like}")
        if self._images.setdefault(original, image) != image:
            raise NotAlikeError(f"{self.like} is given one tensor twice, {self.module} two")

    def of(self, name: str) -> str:
        """The sibling's value for one of the traced layer. Raises NotAlikeError for a value from outside the layer."""
        if name in self._images:
            return self._images[name]
        if name not in self._outside:
            raise NotAlikeError(f"{self.like} reads {name}, which is neither an argument nor its own")
        return name

    def copy(self, node: Op | Boundary) -> Op | Boundary:
        """The sibling's copy of a node; adds the values of its results. Raises NotAlikeError."""
        if isinstance(node, Op) and base_target(node.target) != node.target and node.operands[0] not in self.made:
            raise NotAlikeError(f"{self.like} writes to one of its arguments")
        name = self.fresh(f"{node.name}@{self.module}")
        for i, result in enumerate(node.results):
            image = name if result == node.name else f"{name}.{i}"
            self._images[result] = image
            if self._makes(node):
                self.made.add(result)
            value = self.values[result]
            self.values[image] = Value(
                name=image,
                shape=value.shape,
                dtype=value.dtype,
                carries_gradient=value.carries_gradient,
                storage=self._storage(node, value.storage),
                varying=value.varying,
                is_read=value.is_read,
            )
        module = node.module
        if within(module, self.like):
            module = self.first_name(self.module + module.removeprefix(self.like))
        if isinstance(node, Boundary):
            operand = self.of(node.operand)
            return Boundary(
                name=name, module=module, direction=node.direction, path=node.path, operand=operand, result=name
            )
        args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
        results = tuple(self.of(result) for result in node.results)
        if node.name in self.lines:
            self.lines[name] = self.lines[node.name]
        return Op(
            name=name,
            target=node.target,
            args=args,
            kwargs=kwargs,
            results=results,
            module=module,
            is_pointwise=node.is_pointwise,
        )

    def _makes(self, node: Op | Boundary) -> bool:
        """False for a mark of an argument that enters or leaves the layer: its result is the argument still."""
        is_mark = node.module == self.like if isinstance(node, Boundary) else node.target == ALIAS
        return not is_mark or not self.made.isdisjoint(node.operands)

    def _storage(self, node: Op | Boundary, storage: str) -> str:
        """The storage in the sibling for that of a result of `node`: a view has that of the operand it views."""
        viewed = (operand for operand in node.operands if self.values[operand].storage == storage)
        image = self.of(next(viewed, storage))
        return self.values[image].storage if image in self.values else image

    def _arguments(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(self.of(argument.name))
        return tuple(map(self._arguments, argument)) if isinstance(argument, tuple) else argument
