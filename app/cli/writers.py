"""Results on standard output: as text or JSON, at once or as they come.

Text of one prompt is the bare completion. Where there are several results each gets a heading, and they come
out in the order of the prompts: while streaming, the first that is unfinished is shown live, the others wait.

JSON is one document. While streaming it is JSON lines: one for each piece of text as it comes
(``prompt_index`` and ``index`` tell whose), and the document as the last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from engine.outputs import CompletionDelta, CompletionOutput, Logprob, PositionLogprob, RequestOutput


class Writer(Protocol):
    """Shows results. While streaming, `update` tells what one completion has gained."""

    def update(self, prompt_index: int, delta: CompletionDelta) -> None:
        """Show a piece."""

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Show what was not shown yet; `outputs` are all, in the order of the prompts."""


def make_writer(style: str, *, prompts: Sequence[str], n: int, model: str) -> Writer:
    """The writer for ``--output`` `style`, ``text`` or ``json``."""
    return JsonWriter(model) if style == "json" else TextWriter(prompts, n)


class TextWriter:
    """Completions as text, each character once."""

    def __init__(self, prompts: Sequence[str], n: int) -> None:
        self._prompts = prompts
        self._n = n
        self._order = [(prompt, index) for prompt in range(len(prompts)) for index in range(n)]
        self._current = 0
        """how many of `_order` were shown to their end"""
        self._headed = False
        """the current one has its heading"""
        self._waiting: dict[tuple[int, int], str] = {}
        """text that was not shown yet"""
        self._ended: set[tuple[int, int]] = set()

    def update(self, prompt_index: int, delta: CompletionDelta) -> None:
        key = (prompt_index, delta.index)
        self._waiting[key] = self._waiting.get(key, "") + delta.text
        if delta.finish_reason is not None:
            self._ended.add(key)
        self._advance()

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        for prompt_index, output in enumerate(outputs):
            for completion in output.outputs:
                key = (prompt_index, completion.index)
                if key not in self._ended:
                    self._waiting[key] = completion.text
                    self._ended.add(key)
        self._advance()

    def _advance(self) -> None:
        """Show what the current completion has gained, and go on to the next while it is at its end."""
        while self._current < len(self._order):
            key = self._order[self._current]
            if key not in self._waiting:
                return
            if not self._headed:
                self._headed = True
                sys.stdout.write(self._heading(*key))
            sys.stdout.write(self._waiting[key])
            self._waiting[key] = ""
            ended = key in self._ended
            if ended:
                sys.stdout.write("\n")
                self._current += 1
                self._headed = False
            sys.stdout.flush()
            if not ended:
                return

    def _heading(self, prompt_index: int, index: int) -> str:
        if len(self._order) == 1:
            return ""
        which = f" ({index + 1} of {self._n})" if self._n > 1 else ""
        gap = "\n" if self._current else ""
        return f"{gap}==> {prompt_index + 1}/{len(self._prompts)}{which}: {self._prompts[prompt_index]}\n"


class JsonWriter:
    """Results as JSON in UTF-8."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._streamed = False

    def update(self, prompt_index: int, delta: CompletionDelta) -> None:
        self._streamed = True
        if delta.text or delta.finish_reason is not None:
            self._write(
                {
                    "prompt_index": prompt_index,
                    "index": delta.index,
                    "text": delta.text,
                    "token_ids": delta.token_ids,
                    "finish_reason": _finish_reason(delta),
                }
            )

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        document = {
            "model": self._model,
            "results": [_result(number, output) for number, output in enumerate(outputs)],
            "usage": {
                "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
                "cached_tokens": sum(output.num_cached_tokens for output in outputs),
                "completion_tokens": sum(len(c.token_ids) for output in outputs for c in output.outputs),
            },
        }
        self._write(document, indent=None if self._streamed else 2)

    def _write(self, value: object, indent: int | None = None) -> None:
        sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")
        sys.stdout.flush()


def _result(prompt_index: int, output: RequestOutput) -> dict[str, Any]:
    completions = []
    for completion in output.outputs:
        entry = {
            "index": completion.index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": _finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            entry["logprobs"] = [_position(logprobs) for logprobs in completion.logprobs]
        if completion.error is not None:
            entry["error"] = completion.error
            entry["failure_id"] = completion.failure_id
        completions.append(entry)
    return {
        "prompt_index": prompt_index,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": completions,
    }


def _finish_reason(completion: CompletionDelta | CompletionOutput) -> str | None:
    return None if completion.finish_reason is None else completion.finish_reason.value


def _position(logprobs: PositionLogprob) -> dict[str, Any]:
    return {**_logprob(logprobs.chosen), "top": [_logprob(entry) for entry in logprobs.top]}


def _logprob(entry: Logprob) -> dict[str, Any]:
    return {"token_id": entry.token_id, "token": entry.token, "logprob": entry.logprob, "rank": entry.rank}
