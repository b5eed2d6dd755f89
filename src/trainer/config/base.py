"""The base of every config section: strict types, unknown keys are errors, values are frozen once loaded."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer.config.schema import shape_of_field

Weight = Annotated[float, Field(gt=0.0, le=1e100)]
"""A share relative to others; bounded, so that their sum is a number."""


class Section(BaseModel):
    """One TOML table. The docstring under each field is its help text (``trainer sft --help SECTION``)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # "false" is not false, 1 is not true, "5" is not 5
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _from_toml(cls, data: Any) -> Any:
        """TOML has no null and no tuple: "none" unsets a field that may be unset, and a list fills a tuple."""
        if not isinstance(data, dict):
            return data
        plain = dict(data)
        for name in plain.keys() & cls.model_fields.keys():
            shape, value = shape_of_field(cls, name), plain[name]
            if shape.optional and value in ("none", "None") and value not in shape.choices:
                plain[name] = None
            elif shape.kind in ("list", "sections") and isinstance(value, list):
                plain[name] = tuple(value)
        return plain
