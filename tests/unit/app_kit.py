"""A handler as registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pgworkd import App
from pgworkd.engine.registry import Handler


def registered(function: Callable[..., Any], **options: Any) -> Handler:
    app = App()
    assert app.handler("k", **options)(function) is function, "the decorator leaves the function alone"
    assert app.handlers.keys() == {"k"}
    return app.handlers["k"]
