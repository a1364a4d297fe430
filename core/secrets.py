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
    r"token(?!i[zs]|s)|secret|passw|passphrase|api[-_]?key|access[-_]?key|private[-_]?key|(?:^|[-_])(?:key|pw|pwd)$"
    r"|credential|(?:^|[-_])auth(?:$|[-_])|authorization|bearer",
    re.IGNORECASE,
)
# What the makers of well-known services put in front of their tokens; hf_eval.log is a file.
_VALUE = re.compile(
    r"\b(?:hf_(?!token|[A-Za-z0-9]*\.(?:csv|gz|html|jsonl?|log|out|pt|py|sqlite|txt|ya?ml)\b)[A-Za-z0-9]{3,}"
    r"|gh[pousr]_\w{10,}|github_pat_\w{10,}|sk-[\w-]{8,}|xox[abprs]-[\w-]{8,}|AKIA[0-9A-Z]{12,})"
)
_USER_IN_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]+@")
_SECRET_IN_QUERY = re.compile(r"(?P<name>[?&;](?P<key>[^=&;\s]+)=)[^&;\s]+")

_QUERY_ON_WEB = re.compile(r"(?P<page>\bhttps?://[^\s?#'\"]*\?)[^\s#'\"]+", re.IGNORECASE)  # signatures, as a rule

# A program within a word, a header, a table: name=value, --name value, "name": "value", Bearer value.
_PAIR_WITHIN = re.compile(
    r"""(?P<name>(?P<key>[A-Za-z][\w-]{0,80})["']?(?:=|:\s{0,4})["']?|(?<![\w-])--?(?P<option>[\w-]{1,80})\s{1,4}(?!-))"""
    r"""[^\s"'&;,]+"""
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
    word = _SCHEME_WITHIN.sub(rf"\g<name> {MASK}", word)
    return _PAIR_WITHIN.sub(
        lambda found: found["name"] + MASK if _NAME.search(found["key"] or found["option"]) else found[0], word
    )


def masked_text(text: str) -> str:
    """Return a text without user names, passwords, tokens and queries in URLs, and without tokens of known makers."""
    text = _QUERY_ON_WEB.sub(rf"\g<page>{MASK}", text)
    text = _USER_IN_URL.sub(rf"\g<scheme>{MASK}@", text)
    text = _SECRET_IN_QUERY.sub(lambda found: found["name"] + MASK if _NAME.search(found["key"]) else found[0], text)
    return _VALUE.sub(MASK, text)
