"""``/debug/alloc/ui``: the memory page. Its files come with the packages; none is loaded from elsewhere."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

import anyio.to_thread
from fastapi import APIRouter
from starlette.responses import Response

from app.http_errors import ApiError, public_text

__all__ = ["memory_page_router"]

_STATIC = resources.files("app") / "static"
_FILES: Mapping[str, tuple[Traversable, str]] = {
    "memory.css": (_STATIC / "memory.css", "text/css; charset=utf-8"),
    "memory.js": (_STATIC / "memory.js", "text/javascript; charset=utf-8"),
    "trace_model.js": (_STATIC / "trace_model.js", "text/javascript; charset=utf-8"),
    "plotly.min.js": (
        resources.files("plotly") / "package_data" / "plotly.min.js",
        "text/javascript; charset=utf-8",
    ),
}
# The chart library sets style attributes; nothing else may be inline, and nothing comes from elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; "
    "style-src-attr 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


@cache
def _taken_ids() -> str:
    """Empty elements for styles that the chart library brings for maps, and leaves out if they are there."""
    script = _FILES["plotly.min.js"][0].read_bytes()
    found = re.findall(rb'getElementById\("([0-9a-f]{64})"\)', script)
    return "".join(f'<meta id="{name.decode()}">' for name in dict.fromkeys(found))


def memory_page_router() -> APIRouter:
    """The page and its files."""
    router = APIRouter(prefix="/debug/alloc/ui", tags=["Memory"], include_in_schema=False)

    @router.get("")
    async def page() -> Response:
        nonce = secrets.token_urlsafe(16)
        text = (_STATIC / "memory.html").read_text(encoding="utf-8")
        text = text.replace("{nonce}", nonce).replace(
            "{taken ids}", await anyio.to_thread.run_sync(_taken_ids)
        )
        headers = {
            **_HEADERS,
            "Content-Security-Policy": _POLICY.format(nonce=nonce),
            "Cache-Control": "no-store",
        }
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/{name}")
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise ApiError(404, f"there is no file {public_text(name)[:100]!r} here")
        path, media_type = _FILES[name]
        headers = {**_HEADERS, "Cache-Control": "max-age=3600"}
        return Response(path.read_bytes(), media_type=media_type, headers=headers)

    return router
