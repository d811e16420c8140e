"""``vtserve doctor``: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import json
import os

import click

from app.cli.options import HelpfulCommand

EPILOG = """\b
Example:
  vtserve doctor
"""


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def doctor(as_json: bool) -> None:
    """Say what of this machine vtserve can use, and what to install or change.

    Status 1 if something is broken.
    """
    from app.doctor import State, examine

    findings = []
    for finding in examine(os.environ):
        findings.append(finding)
        if not as_json:
            mark = {State.OK: "ok", State.MISSING: "--", State.BROKEN: "!!"}[finding.state]
            click.echo(f"{mark}  {finding.name:26} {finding.what}")
            if finding.advice:
                click.echo(f"    {'':26} {finding.advice}")
    if as_json:
        facts = [
            {"name": f.name, "state": f.state.value, "what": f.what, "advice": f.advice} for f in findings
        ]
        click.echo(json.dumps(facts, indent=1))
    if any(finding.state is State.BROKEN for finding in findings):
        click.get_current_context().exit(1)
