"""A report as Markdown."""

from __future__ import annotations

from jaxis.bringup.checklist.checklist import Report


def report_markdown(report: Report) -> str:
    verdict = "every item is ticked" if report.passed else "NOT every item is ticked"
    lines = [f"# Bring-up of {report.model}", "", f"{', '.join(report.analysis.architectures)}: {verdict}.", ""]
    for item in report.items:
        lines.append(f"- [{'x' if item.passed else ' '}] **{item.title}**")
        lines += [f"  - {line}" for line in item.evidence]
        lines += [f"  - `{command}`" for command in item.commands]
    lines += ["", "## Made with", "", f"- {report.made_at}, {report.machine}"]
    lines += [f"- {name} {version}" for name, version in report.verifications[0].versions.items()]
    lines += [f"- reference: {report.verifications[0].reference}; weights: {report.verifications[0].weights}"]
    lines += [f"- SHA-256 of {name}: {value}" for name, value in report.verifications[0].hashes.items()]
    return "\n".join(lines) + "\n"
