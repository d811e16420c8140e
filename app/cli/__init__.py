"""The command line: ``vtserve COMMAND``, also ``python -m app.cli``. One module a command."""

from __future__ import annotations

try:
    import click

    from app.cli.group import CommandGroup, LazyCommand
except KeyboardInterrupt:  # nothing is there yet that would end it without a traceback
    raise SystemExit(130) from None

COMMANDS = {
    "serve": LazyCommand("app.cli.serve:serve", "Serve a model over HTTP, in OpenAI's protocol."),
    "generate": LazyCommand("app.cli.generate:generate", "Complete prompts offline."),
    "plan": LazyCommand("app.cli.plan:plan", "Say what a load would take, and whether it fits."),
    "chat": LazyCommand("app.cli.chat:chat", "Talk to a model that is served."),
    "bench": LazyCommand("app.cli.bench:bench", "Measure a server under load."),
    "quantize": LazyCommand("app.cli.quantize:quantize", "Turn a GGUF or 16-bit model into NVFP4."),
    "trace": LazyCommand("app.cli.trace:trace", "Read, compare, replay and convert memory traces."),
    "doctor": LazyCommand("app.cli.doctor:doctor", "Say what works on this machine."),
    "perplexity": LazyCommand("app.cli.perplexity:perplexity", "Measure a model on a text file."),
}

EPILOG = """\b
Example:
  vtserve generate --prompt "The capital of France is"
"""


@click.group(
    cls=CommandGroup,
    lazy_commands=COMMANDS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="vtserve", prog_name="vtserve")
def main() -> None:
    """Serve NVFP4 language models, and account for every byte of device memory."""
