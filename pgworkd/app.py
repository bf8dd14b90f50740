"""The App of a program: the engine's registry, with what needs more than the engine."""

from __future__ import annotations

from pgworkd.engine import registry


class App(registry.App):
    """A set of handlers. `pgworkd run --app module:attribute` names one of these."""
