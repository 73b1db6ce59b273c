"""Base of all records: frozen, typed, strict, and readable as JSON whose every error names the field's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsedeploy.errors import InputError

R = TypeVar("R", bound="Record")


class Record(BaseModel):
    """A frozen record; unknown fields and wrong types are refused.

    Records cross stages and processes, so their JSON form is the contract: field order is declaration order and the
    text ends with a newline, which makes two writes of equal records byte-identical.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        ser_json_inf_nan="constants",
        protected_namespaces=(),
        populate_by_name=True,
    )

    TITLE: ClassVar[str] = "a record"
    """What a file of it is to its user, for messages."""

    def to_json(self) -> str:
        """The record as indented JSON text with a trailing newline."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"

    @classmethod
    def from_json(cls: type[R], text: str | bytes, origin: str | Path) -> R:
        """Read a record; raises InputError naming `origin` and the first wrong field's path (`layers.0.choice`)."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"]) or "the document"
            more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
            raise InputError(
                f"{origin}: {path}: {_words(first)}{more}. Needed: {cls.TITLE}, as this version of sparsedeploy writes it; "
                "correct that or make the file again."
            ) from error


def _words(error: Any) -> str:
    """The first error, what was found beside what was needed."""
    found = error.get("input")
    told = isinstance(found, str | int | float) and error["type"] not in ("extra_forbidden", "json_invalid")
    return f"{error['msg']}, found {str(found)[:40]!r}" if told else str(error["msg"])


class Document(Record):
    """A record that is a file of its own: it says which schema it follows, and another schema is refused."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
