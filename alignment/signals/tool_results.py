"""Whether a tool's result reports success, a failure, or neither surely.

Structure comes before words: flags, error fields, exit and HTTP statuses and counts of a JSON result decide, then the
statuses and counts that compilers, test runners and other programs print, and only then words. A text with words about
errors but none of these is unsure: it may be a page about errors, or a log that was searched.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import JsonValue

MAX_CHARS = 20_000  # of a text, from its beginning and from its end
MAX_DEPTH = 8

FAILURE_FLAGS = ("isError", "is_error", "has_error", "hasError", "failed", "timed_out", "timedOut")
SUCCESS_FLAGS = ("ok", "success", "succeeded", "successful", "passed")
ERROR_FIELDS = ("error", "errors", "exception", "failure", "failures", "err", "error_message", "errorMessage")
EXIT_FIELDS = ("exit_code", "exitCode", "exit_status", "exitStatus", "returncode", "return_code", "returnCode", "rc")
HTTP_FIELDS = ("status", "status_code", "statusCode", "http_status", "httpStatus", "code")
STATE_FIELDS = ("status", "state", "result", "outcome")
DIAGNOSTIC_FIELDS = {"code", "severity", "level", "rule", "ruleId", "line"}
MESSAGE_FIELDS = {"detail", "message", "msg", "title", "code"}  # of a message that may be about an error
CONTENT_FIELDS = ("result", "content", "structuredContent", "structured_content", "output", "text")
NOTHING = {"", "none", "no", "null", "nil", "false", "0", "ok", "n/a", "-", "no error", "no errors", "success"}
GOOD_STATES = {
    "ok",
    "success",
    "succeeded",
    "successful",
    "passed",
    "completed",
    "done",
    "created",
    "updated",
    "deleted",
}
BAD_STATES = {"error", "failed", "failure", "fail", "fatal", "exception", "timeout", "timed_out", "rejected", "denied"}

STATUS_LINE = re.compile(
    r"(?m)^(?:< )?HTTP/[\d.]+ (\d{3})\b|^(?:HTTP |status(?: code)?[: =]+|HTTPError: |HTTP Error )(\d{3})\b"
    r"|^([45]\d{2}) (?:Bad|Unauthorized|Forbidden|Not|Method|Conflict|Gone|Unprocessable|Too|Internal|Service|Gateway)",
    re.I,
)
EXIT_LINE = re.compile(
    r"(?i)\b(?:exit(?:ed)?(?: with)?(?: (?:code|status))|returned(?: non-zero)? exit (?:code|status)|"
    r"return ?code|exit_code)[: =]*\(?(-?\d+)"
)
PROBLEMS = r"failed|failures?|failing|errors?|problems?|issues?|violations?|broken"
# "3 failed", "Failures: 0", "errors=2"; a count of warnings says nothing.
COUNT = re.compile(
    rf"(?i)(?<![\w.:/-])(\d+|no) (?:new |more )?(?:{PROBLEMS})\b(?! (?:code|message|handl))"
    r"|\b(?:failed|failures?|errors?|problems?|issues?|unreachable)\s*[:=]\s*(\d+)\b(?!:)"
)
SUCCESS_TEXT = re.compile(
    r"(?im)^[^\w\n]*(?:success\b|build success|all checks passed|ok[^\w\n]*$|no (?:issues|errors|problems) found|"
    r"apply complete|\d+ passed\b)"
    r"|^=+ (?:\d+ \w+, )*\d+ passed\b|\bBUILD SUCCESS\b|\b\d+ passed in [\d.]+ ?s|^OK \(|^OK$|: OK$"
)
NAMED_ERROR = r"(?:[A-Za-z_][\w.]*)?(?:Error|Exception)"
# What a program prints after its name: "ls: cannot access 'x'".
COMPLAINTS = (
    r"unknown (?:option|command)|Is a directory|Not a directory|No such process|[Ss]yntax error|unexpected \w+|"
    r"command not found|not found|[Pp]ermission denied|[Nn]o such file or directory|package .* is not installed|"
    r"cannot \w+|can't \w+|unable to|invalid option|unrecognized|illegal option"
)
FAILURES = (  # at the beginning of a line
    r"Traceback \(most recent call last\)|Exception in thread|Unhandled (?:exception|rejection)|panic:",
    r"thread '.*' .*panicked",
    rf"(?:Uncaught )?{NAMED_ERROR}(?:\s*\[[\w-]+\])?: \S",
    r"[^\s:]+(?:\(\d+,\d+\)|:\d+(?::\d+)?)?: (?:fatal )?error\b[: ]",
    r"error(?:\[\w+\])?: \S|ERROR: +\S|ERROR \d+ \(|\[ERROR\]|FATAL: |fatal: \S|npm (?:ERR!|error)|make: \*\*\*|E: \S",
    r"\W{0,3}Errors?: +\S|MCP error -?\d+|Error executing tool|FAILED\b|FAIL\b|BUILD FAIL|CMake Error|│ Error:",
    rf"[\w./-]+: (?:line \d+: |\d+: )?(?:.{{1,80}}: )?(?:{COMPLAINTS})",
    r"(?:curl|wget|ssh|tar|unzip|rsync|gcc|g\+\+|ld): .*\b(?:failed|[Cc]ould not|cannot|refused|Error|not)\b",
    r"(?:Failed|Unable|Could not|Cannot|Can't) (?:to|with|connect|open|find|read|load|resolve|be)\b",
    r"Connection (?:refused|reset|timed out)|Access denied|Permission denied|Unauthorized|Forbidden",
    r"(?:The )?[Rr]equest (?:failed|timed out)|(?:Input )?[Vv]alidation error",
    r"Invalid (?:params|arguments|input|request)|.*\bfailed: [A-Z]\w+|Unknown (?:tool|command)",
    r"usage: .*\n(?:.*\n)*?\S+: error:",
)
FAILURE_LINES = re.compile(f"(?m)^(?:{'|'.join(FAILURES)})")
ERROR_START = re.compile(r"\W*(?:error|exception|failure|fatal)s?\s*[:(\]!]|\W*failed (?:to|with)\b", re.I)
ERROR_WORD = re.compile(
    r"(?i)\b(?:errors?|fail(?:s|ed|ure|ures|ing)?|exceptions?|fatal|denied|invalid|unable|cannot|can't|could not|"
    r"couldn't|refused|timed? ?out|traceback|panic|unknown|missing|undefined|unexpected|warning|empty|declined|not?|"
    r"none)\b|[a-z]Error\b|[a-z]Exception\b"
)
# What a program says about itself goes to its standard error: "merge: nothing to merge".
PROGRAM_MESSAGE = re.compile(r"(?:/\S+/)?[a-z][\w.+-]{1,20}(?:\[\d+\])?: \S")


def outcome(content: object, depth: int = 0) -> bool | None:
    """Return True if the content of a tool's message reports success, False for a failure, None if that is unsure.

    Example: "Errors: 0 in 14 files" -> True; '{"error": "no such order"}' -> False; "the word error" -> None
    """
    if depth > MAX_DEPTH:
        return None
    if isinstance(content, str):
        parsed = _parse(content)
        return _text_outcome(content) if parsed is content else outcome(parsed, depth + 1)
    if isinstance(content, Mapping):
        return _object_outcome(content, depth)
    if isinstance(content, Sequence):
        return _list_outcome(content, depth)
    return None if content is None else True  # a number or a truth value is an answer


def _parse(text: str) -> JsonValue:
    """Return the JSON value of the text; the same text if it is none, or is a single word or number."""
    if text.lstrip()[:1] not in ("{", "[", '"') or len(text) > 50 * MAX_CHARS:
        return text
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def _list_outcome(items: Sequence[JsonValue], depth: int) -> bool | None:
    """Return the outcome of a list of content parts, or of records, which are data."""
    parts = [item for item in items if isinstance(item, Mapping)]
    if any(_is_true(part.get(flag)) for part in parts for flag in ("isError", "is_error")):
        return False
    if parts and all(
        isinstance(part.get("type"), str) and ("text" in part or "data" in part or "resource" in part) for part in parts
    ):
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        return _all_succeed(outcome(text, depth + 1) for text in texts) if texts else True
    if parts and any("message" in part and DIAGNOSTIC_FIELDS & part.keys() for part in parts):
        return None  # what a linter has found
    return True


def _object_outcome(record: Mapping[str, JsonValue], depth: int) -> bool | None:
    evidence = _object_evidence(record, depth)
    if evidence:
        return _decide(evidence)
    for field in CONTENT_FIELDS:
        if isinstance(record.get(field), str | Mapping | Sequence) and len(record) <= 4:
            return outcome(record[field], depth + 1)
    return None if record and record.keys() <= MESSAGE_FIELDS else True


def _object_evidence(record: Mapping[str, JsonValue], depth: int) -> set[bool]:
    """Return what the fields of a JSON object say about its success; both values if they contradict each other."""
    evidence: set[bool] = set()
    for flag in FAILURE_FLAGS:
        value = record.get(flag)
        if isinstance(value, bool):
            evidence.add(not value)
        elif flag == "failed" and isinstance(value, int):
            evidence.add(value == 0)
    for flag in SUCCESS_FLAGS:
        value = record.get(flag)
        if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
            evidence.add(_is_true(value))
    for field in ERROR_FIELDS:
        if field in record and (is_error := _is_error_value(record[field])) is not None:
            evidence.add(not is_error)
    for field in EXIT_FIELDS:
        if isinstance(code := record.get(field), int) and not isinstance(code, bool):
            evidence.add(code == 0)
    for field in HTTP_FIELDS:
        if isinstance(code := record.get(field), int) and not isinstance(code, bool) and 200 <= code < 600:
            evidence.add(code < 400)
    for field in STATE_FIELDS:
        if isinstance(state := record.get(field), str):
            evidence |= {True} if state.lower() in GOOD_STATES else {False} if state.lower() in BAD_STATES else set()
    return evidence


def _is_error_value(value: JsonValue) -> bool | None:
    """Return whether the value of an error field is an error; None for a number that may be a measure."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.strip().lower() not in NOTHING
    if isinstance(value, int | float):
        return None if isinstance(value, float) and value else bool(value)
    if isinstance(value, Mapping) and value and all(item in (None, 0, "", False, [], {}) for item in value.values()):
        return False
    return bool(value)


def _is_true(value: JsonValue) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _decide(evidence: set[bool]) -> bool | None:
    return evidence.copy().pop() if len(evidence) == 1 else None


def _all_succeed(outcomes: Iterable[bool | None]) -> bool | None:
    """Return False if one part failed, None if one is unsure, else True."""
    seen = set(outcomes)
    return False if False in seen else None if None in seen else True


def _text_outcome(text: str) -> bool | None:
    if text.strip().lower() in ("null", "none", "nil") or not any(character.isalnum() for character in text):
        return None
    if len(text) > 2 * MAX_CHARS:
        text = f"{text[:MAX_CHARS]}\n{text[-MAX_CHARS:]}"
    exits = [int(match[1]) for match in EXIT_LINE.finditer(text)]
    if exits:
        return exits[-1] == 0
    codes = [int(next(filter(None, match.groups()))) for match in STATUS_LINE.finditer(text)]
    if codes:
        return codes[-1] < 400
    counts = list(_counts(text))
    if any(counts):
        return False
    succeeds = SUCCESS_TEXT.search(text) is not None
    fails = FAILURE_LINES.search(text) is not None or ERROR_START.match(text) is not None
    if counts or succeeds:
        return None if fails and not counts else True
    if fails:
        return False
    return None if ERROR_WORD.search(text) or PROGRAM_MESSAGE.match(text.strip().splitlines()[-1]) else True


def _counts(text: str) -> Iterator[int]:
    for match in COUNT.finditer(text):
        number = match[1] or match[2]
        yield 0 if number.lower() == "no" else int(number[:6])
