"""Answers of other processes and servers, with their types."""

from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from alignment.environments.errors import InfrastructureFailure

Model = TypeVar("Model", bound=BaseModel)


def read_answer(model: type[Model], answer: JsonValue, label: str) -> Model:
    """Return an answer of `label` with its types. Raises InfrastructureFailure if it has others."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise InfrastructureFailure(f"{label} has answered with a wrong {where}: {problem}") from error


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first wrong value, and what is wrong with it.

    Example: ("tasks.0.seed", "Input should be a valid integer")
    """
    first = error.errors()[0]
    return ".".join(str(part) for part in first["loc"]), first["msg"]
