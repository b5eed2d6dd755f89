"""Makes the restore of every `trainer` process faulty, in the way that SABOTAGE names. On PYTHONPATH of child processes.

Python imports a module of this name at its start. The trainer is patched when its own module is imported, so that nothing
in src/ knows about this.
"""

import importlib.abc
import importlib.util
import os
import sys

TARGETS = {
    "skip": "trainer.checkpoint.app_state",
    "nudge": "trainer.checkpoint.app_state",
    "noise": "trainer.train.step",
}


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, target, patch):
        self.target, self.patch = target, patch

    def find_spec(self, name, path=None, target=None):
        if name != self.target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.patch(module)

        spec.loader.exec_module = exec_module
        return spec


def _skip(owner):
    """The owner's state is not taken over."""

    def patch(module):
        load = module.AppState.load

        def load_without(self, directory, *, skip=frozenset(), **rest):
            load(self, directory, skip={*skip, owner}, **rest)

        module.AppState.load = load_without

    return patch


def _nudge(owner):
    """The owner's first tensor is not quite what was saved, once everything has been loaded and verified."""

    def patch(module):
        load = module.AppState.load

        def load_and_nudge(self, directory, **keywords):
            load(self, directory, **keywords)
            tensor = next(iter(self.owners[owner].state_dict().values()))
            tensor.detach().mul_(1.001)

        module.AppState.load = load_and_nudge

    return patch


def _noise(module):
    """A kernel that is not deterministic: the last bit of the loss depends on the process."""
    step = module.train_step

    def train_step(model, optimizer, loss_function, batch, **keywords):
        def noisy(model, micro_batch):
            return loss_function(model, micro_batch) * (1 + 1e-6 * (os.getpid() % 97))

        return step(model, optimizer, noisy, batch, **keywords)

    module.train_step = train_step


_kind, _, _what = os.environ.get("SABOTAGE", "").partition(":")
if _kind in TARGETS:
    _patch = {"skip": _skip(_what), "nudge": _nudge(_what), "noise": _noise}[_kind]
    sys.meta_path.insert(0, _PatchAfterImport(TARGETS[_kind], _patch))
