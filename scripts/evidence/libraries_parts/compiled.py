"""PyPI's wheels of torchvision and torchaudio are built for CUDA: with a CPU build of torch their compiled parts do not
load. Models need none of them; what is looked for on import is declared here. Does nothing where they load."""

import importlib.util
import sys
import types

import torch


def declare_missing() -> torch.library.Library | None:
    """To be called before either is imported. The library is to be kept: its declarations live as long."""
    if torch.version.cuda is not None:
        return None
    extension = types.ModuleType("torchaudio._extension")
    extension._IS_TORCHAUDIO_EXT_AVAILABLE = False  # type: ignore[attr-defined]
    extension.fail_if_no_align = lambda function: function  # type: ignore[attr-defined]
    sys.modules.setdefault(extension.__name__, extension)
    return _declared_operators()


def _declared_operators() -> torch.library.Library | None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(spec.origin.replace("__init__.py", "_C.so")):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _loads(path: str) -> bool:
    try:
        torch.ops.load_library(path)
    except OSError:
        return False
    return True
