"""What a client of a server that speaks OpenAI's protocol needs beside its requests."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from engine.errors import VtserveError

__all__ = ["ServerError", "first_model", "split_keys", "what_went_wrong"]

_SECONDS = 30.0


class ServerError(VtserveError):
    """The server is not there, or refused. One line that names it."""


def split_keys(environ: Mapping[str, str]) -> str | None:
    """The first key of ``VTSERVE_API_KEY``."""
    keys = [key.strip() for key in environ.get("VTSERVE_API_KEY", "").split(",")]
    return next(filter(None, keys), None)


def first_model(base_url: str, api_key: str | None) -> str:
    """The name of the first model that the server lists.

    Raises
    ------
    ServerError
        It does not answer, refuses, or has none.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{base_url}: {error or type(error).__name__}") from None
    if response.status_code != 200:
        raise ServerError(f"{base_url}: {what_went_wrong(response)}")
    try:
        name: str = response.json()["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise ServerError(f"{base_url}: /v1/models lists no model: is it OpenAI's protocol?") from None
    return name


def what_went_wrong(response: httpx.Response) -> str:
    """Status and message of a response that is an error, in one line. Its body must have been read."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200] or response.reason_phrase
    return f"{response.status_code}: {' '.join(message.split())}"
