"""Which class runs which architecture of config.json."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.model.llama import Llama
from engine.model.mistral import Mistral
from engine.model.qwen2 import Qwen2
from engine.model.qwen3 import Qwen3

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def model_class(architecture: str) -> type[Llama]:
    """The class for an entry of ``architectures``. Raises UnsupportedModelError naming what is served."""
    try:
        return MODELS[architecture]
    except KeyError:
        raise UnsupportedModelError(
            f"config.json: architectures: {architecture!r} is not served; expected one of {', '.join(MODELS)}"
        ) from None
