"""What verl loads through its entry point `verl.plugins`: registers our trainer when verl's trainers are imported.

verl imports every plug-in in every process, and says nothing where that fails. So this module imports the standard
library only. Where the trainer cannot be had, a stand-in with its name raises the reason as soon as a run asks for it;
runs with other trainers are not disturbed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TRAINERS = "verl.trainer.ppo.v1"
SUPPORTED = ((0, 9, 1), (0, 10, 0))
"""Versions of verl from the first up to, but not including, the second."""


def register() -> None:
    """Register the trainer `agentropy`, or the reason why it is not to be had. verl's trainers are loaded already."""
    try:
        _check_version()
        importlib.import_module("agentropy.integrations.verl.trainer")
    except Exception as error:
        print(f"agentropy: the verl trainer 'agentropy' is not to be had: {error}", file=sys.stderr, flush=True)
        _register_reason(error)


def _check_version() -> None:
    from importlib.metadata import version

    from agentropy.errors import UserError

    found = version("verl")
    numbers = tuple(int(n) for n in found.split(".")[:3] if n.isdigit())
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise UserError(f"agentropy works with verl 0.9 from 0.9.1 on, not {found}: pip install 'agentropy[verl]'")


def _register_reason(reason: Exception) -> None:
    base: Any = importlib.import_module(f"{TRAINERS}.trainer_base")
    if "agentropy" in base.TRAINER_REGISTRY:
        return

    class NotToBeHad(base.PPOTrainer):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            raise RuntimeError(f"the trainer 'agentropy' is not to be had: {reason}") from reason

        def on_step_end(self) -> None: ...

        def on_sample_end(self) -> None: ...

    base.register_trainer("agentropy")(NotToBeHad)


class _AfterTrainers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads verl's package of trainers as it would be loaded without us, and then ours."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package's own spec with us as its loader; None for every other module."""
        if fullname != TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the package's own loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the package, then register."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register()


if TRAINERS in sys.modules:
    register()
elif not any(type(finder).__name__ == "_AfterTrainers" for finder in sys.meta_path):
    sys.meta_path.insert(0, _AfterTrainers())
