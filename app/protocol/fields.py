"""What requests for text have in common: the fields of OpenAI's API and vLLM's beside them.

Types are checked here, and strictly: a wrong one is answered with 422. Ranges are `SamplingParams`' business,
which is what every field ends in: a wrong value is answered with 400.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from app.http_errors import ApiError
from engine.errors import RequestError
from engine.sampling_params import SamplingParams

__all__ = ["Int64", "RequestModel", "StreamOptions", "TextRequest", "TokenId"]

MAX_N = 1024
"""completions of one HTTP request: prompts times `n`"""

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(max_length=4096)]


class RequestModel(BaseModel):
    """A body. Unknown fields are refused: one that is misspelt would be ignored in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(RequestModel):
    """Options of ``"stream": true``."""

    include_usage: bool = Field(False, description="End with a chunk of usage, whose `choices` is empty.")
    continuous_usage_stats: bool = Field(False, description="Usage so far in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is added.")


class TextRequest(RequestModel):
    """Fields of both completions and chat completions."""

    model: str | None = Field(None, description="One of /v1/models; the served model if left out.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    n: Int64 | None = 1
    temperature: float | None = Field(1.0, description="0 is greedy.")
    top_p: float | None = 1.0
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = Field(None, description="Token id to bias, -100 to 100.")

    top_k: Int64 | None = Field(0, description="0 or -1: all.")
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_tokens: Int64 | None = 0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    prompt_logprobs: Int64 | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        0, description="Lower goes first under --scheduling-policy priority."
    )
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    user: str | None = Field(None, description="Accepted; changes nothing.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted; changes nothing.")

    RENAMED: ClassVar[dict[str, str]] = {}
    """how `SamplingParams`' fields are called here"""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check_stream_options(self) -> Self:
        """Refuse stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, 'stream_options: expected with "stream": true', param="stream_options")
        return self

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The parameters that these fields come to. A null is the default.

        Raises
        ------
        ApiError
            400: a value cannot be used; names the field as it is called here.
        """
        default = SamplingParams()
        names = (
            *("n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p"),
            *("repetition_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
            *("include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
        )
        given = {name: getattr(self, name) for name in names}
        values = {name: getattr(default, name) if value is None else value for name, value in given.items()}
        with renamed_errors(self.RENAMED):
            return SamplingParams(
                **values, max_tokens=max_tokens, logprobs=logprobs, logit_bias=self._logit_bias()
            )

    def _logit_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        biases = {}
        for token, bias in self.logit_bias.items():
            if not (token.isascii() and token.isdecimal() and len(token) <= 10):
                raise RequestError("logit_bias: expected token ids as keys", field="logit_bias")
            biases[int(token)] = bias
        return biases


class renamed_errors:
    """Turns a `RequestError` inside into one that names the field as the client called it."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RequestError) and error.field in self._names:
            name = self._names[error.field]
            text = str(error)
            if text.startswith(error.field):
                text = name + text[len(error.field) :]
            raise RequestError(text, field=name) from None
