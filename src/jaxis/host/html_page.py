"""Self-contained HTML pages from Jinja templates that extend `page.html.jinja`."""

from __future__ import annotations

from typing import Any

import jinja2


def render_page(package: str, template: str, **values: Any) -> str:
    """Renders a page from a template in a package's folder; all `values` are escaped."""
    loaders = [jinja2.PackageLoader(package, ""), jinja2.PackageLoader("jaxis.host", "")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(values)
