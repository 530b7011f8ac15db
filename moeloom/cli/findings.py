"""What `moeloom doctor` prints: a table on a terminal, plain ASCII lines elsewhere, readable at 80 columns."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeloom.cli.doctor import Finding, works
from moeloom.cli.report import is_plain

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
INDENT = 8  # behind the longest state


def as_json(findings: list[Finding]) -> str:
    """The findings for programs."""
    return json.dumps({"works": works(findings), "findings": [asdict(finding) for finding in findings]}, indent=2)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """All of them, and the verdict."""
    if is_plain(console):
        lines = [line for finding in findings for line in _plain(finding, console.width)]
        console.print("\n".join([*lines, "", verdict(findings)]), markup=False, soft_wrap=True)
        return
    table = Table(box=box.ROUNDED, header_style="bold")
    for title in ("", "what", "found"):
        table.add_column(title)
    for finding in findings:
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n-> {finding.advice}", style="bold" if finding.state == "problem" else "dim")
        table.add_row(Text(finding.state, style=STYLES[finding.state]), finding.name, found)
    console.print(table)
    console.print(verdict(findings), style="bold", markup=False)


def verdict(findings: list[Finding]) -> str:
    """The last line."""
    problems = [finding.name for finding in findings if finding.state == "problem"]
    if not problems:
        without = any(finding.name == "backend" and finding.state != "ok" for finding in findings)
        return f"moeloom works here{' with the CPU backend only: see backend' * without}"
    return f"moeloom does not work here with several ranks: {', '.join(problems)}"


def _plain(finding: Finding, width: int) -> list[str]:
    """One finding and its advice, in ASCII: names of folders and hosts may be anything."""
    lines = []
    texts = (f"{finding.state:<{INDENT}}{finding.name}: {finding.found}", f"{'':<{INDENT}}-> {finding.advice}")
    for text in texts[: 1 + bool(finding.advice)]:
        text = text.encode("ascii", "backslashreplace").decode()
        lines += textwrap.wrap(text, width, subsequent_indent=" " * (INDENT + 3), break_on_hyphens=False)
    return lines
