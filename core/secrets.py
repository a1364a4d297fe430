"""Masks what looks secret in a command line before it is written anywhere."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MASK = "***"
# Parts of names whose value is secret: --hf-token, WANDB_API_KEY, --db-password, aws_secret_access_key.
_NAME = re.compile(
    r"token(?!i[zs]|s)|secret|passw|passphrase|passcode|(?:api|access|private|account|shared)[-_]?key|credential"
    r"|(?:^|[-_])(?:key|pw|pwd)$|^(?:(?:db|user|http|smtp|ssh|sudo)[-_])?(?:pass|pat)$"
    r"|signature|(?:^|[-_])auth(?:$|[-_])|authorization|bearer",
    re.IGNORECASE,
)
# What the makers of well-known services put in front of their tokens; hf_eval.log is a file.
_VALUE = re.compile(
    r"\b(?:hf_(?!token|[A-Za-z0-9]*\.(?:csv|gz|html|jsonl?|log|out|pt|py|sqlite|txt|ya?ml)\b)[A-Za-z0-9]{3,}"
    r"|gh[pousr]_\w{10,}|github_pat_\w{10,}|glpat-[\w-]{8,}|nvapi-[\w-]{8,}|sk-[\w-]{8,}|xox[abprs]-[\w-]{8,}"
    r"|npm_\w{10,}|pypi-[\w-]{10,}|dckr_pat_[\w-]{10,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}"
    r"|eyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]*)"
)
_SLACK = re.compile(r"(?P<host>\bhooks\.slack\.com/services/)[^\s\"']+")
# A password may hold slashes; what looks like a port begins a path.
_USER_IN_URL = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^/\s]{1,400}|[^/@:\s]{0,200}:(?!\d{1,5}/)[^@\s]{1,400})@"
)
_SECRET_IN_QUERY = re.compile(r"(?P<name>[?&;](?P<key>[^=&;?\s]{1,80})=)[^&;\s]+")

_QUERY_ON_WEB = re.compile(
    r"(?P<page>\bhttps?://[^\s?#'\"]{0,2000}\?)[^\s#'\"]+", re.IGNORECASE
)  # signatures, as a rule

# A program within a word, a header, a table: name=value, --name value, "name": "value", Bearer value.
_PAIR_WITHIN = re.compile(
    r"""(?P<name>(?P<key>[A-Za-z][\w-]{0,80})["']?(?:=|:\s{0,4})|(?<![\w-])--?(?P<option>[\w-]{1,80})\s{1,4}(?!-))"""
    r"""(?:(?P<quote>["'])(?:(?!(?P=quote)).)*(?P=quote)|["']?[^\s"'&;,]+)"""
)
_HEADER_WITHIN = re.compile(r"""(?P<name>\bauthorization["']?\s{0,4}:\s{0,4}["']?)[^"'\n]+""", re.IGNORECASE)
_USER_OF_CURL = re.compile(
    r"(?P<name>\bcurl\b[^|;&\n]{0,400}?\s(?:-[A-Za-z]{0,8}u|--user)[\s=]{0,4}[^\s:]{1,80}:)[^\s\"']+"
)
_SCHEME_WITHIN = re.compile(r"\b(?P<name>Bearer|Basic)\s+[^\s\"']+", re.IGNORECASE)


def masked_command(argv: Sequence[str]) -> str:
    """Return a command line as one would type it, with ``***`` for every value that looks secret.

    Masked are the values of options and variables whose name speaks of a secret (``--hf-token VALUE``,
    ``--token=VALUE``, ``KEY=VALUE``), user names and passwords in URLs, and tokens by their makers' prefixes.
    """
    words: list[str] = []
    value_is_secret = False
    for word in argv:
        if value_is_secret and not word.startswith("--"):
            words.append(MASK)
            value_is_secret = False
            continue
        name, sign, _ = word.partition("=")
        is_name = _NAME.search(name.lstrip("-")) is not None and "://" not in name and " " not in name
        if sign and is_name:
            words.append(f"{name}={MASK}")
            value_is_secret = False
        else:
            value_is_secret = not sign and word.startswith("-") and is_name
            words.append(_masked_within(masked_text(word)))
    return shlex.join(words)


def _masked_within(word: str) -> str:
    """Return a word of a command line without secrets of a command line, a header or a table that it holds itself."""
    if " " not in word and "=" not in word and ":" not in word:
        return word
    for pattern in (_HEADER_WITHIN, _USER_OF_CURL):
        word = pattern.sub(rf"\g<name>{MASK}", word)
    word = _SCHEME_WITHIN.sub(rf"\g<name> {MASK}", word)
    return _PAIR_WITHIN.sub(_masked_pair, word)


def _masked_query(found: re.Match[str]) -> str:
    is_secret = found["key"].lower() == "sig" or _NAME.search(found["key"])  # Azure's signatures
    return found["name"] + MASK if is_secret else found[0]


def _masked_pair(found: re.Match[str]) -> str:
    quote = found["quote"] or ""
    return f"{found['name']}{quote}{MASK}{quote}" if _NAME.search(found["key"] or found["option"]) else found[0]


def masked_text(text: str) -> str:
    """Return a text without user names, passwords, tokens and queries in URLs, and without tokens of known makers."""
    text = _QUERY_ON_WEB.sub(rf"\g<page>{MASK}", text)
    text = _SLACK.sub(rf"\g<host>{MASK}", text)
    text = _USER_IN_URL.sub(rf"\g<scheme>{MASK}@", text)
    text = _SECRET_IN_QUERY.sub(_masked_query, text)
    return _VALUE.sub(MASK, text)
