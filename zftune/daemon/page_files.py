"""The page: files of the package, which load nothing from elsewhere."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

INDEX = "index.html"


def page_router() -> APIRouter:
    """/ and what its page consists of, read once."""
    router = APIRouter(include_in_schema=False)
    for entry in files("zftune.daemon").joinpath("page").iterdir():
        kind, _ = mimetypes.guess_type(entry.name)
        if kind is None or not entry.is_file():
            continue
        path = "/" if entry.name == INDEX else f"/{entry.name}"
        router.add_api_route(path, _file(entry.read_bytes(), kind), methods=["GET"])
    return router


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        return Response(content, media_type=kind)

    return file
