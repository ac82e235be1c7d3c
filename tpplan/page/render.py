"""`rendered`: a template of this room filled in; every text in it is escaped."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_FOLDER = Path(__file__).parent


def rendered(template: str, **values: object) -> str:
    """The text of a template of this folder. Raises jinja2.UndefinedError for a name without a value."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
