"""Types of rows and queries of any columns: whoever reads a row knows its columns by the names of the query."""

from typing import Any

from sqlalchemy import Row, Select

AnyRow = Row[*tuple[Any, ...]]
AnySelect = Select[*tuple[Any, ...]]
