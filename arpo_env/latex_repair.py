r"""Repairs LaTeX whose backslashes were read as escape sequences.

Written without a raw string (or as JSON with single backslashes), ``\boxed`` becomes BACKSPACE + "oxed" and ``\frac`` FORM FEED + "rac". A control
character and the letters after it become the command again when together they spell one exactly, as TeX reads it: up to the first character
that is no letter. FORM FEED + "finite" (left by a ligature in "infinite") stays what it is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_COMMANDS = {
    # BELL, BACKSPACE, VERTICAL TAB and FORM FEED have no other use in front of a letter: every common command.
    "\x07": "acute aleph alpha amalg angle approx approxeq arccos arccot arcsin arctan arg array ast asymp atop",
    "\x08": "backsim backslash bar barwedge because begin beta beth between bf bfseries big bigcap bigcup bigg biggl biggm biggr bigl bigm bigodot"
    " bigoplus bigotimes bigr bigskip bigsqcup bigstar bigtriangledown bigtriangleup biguplus bigvee bigwedge binom blacklozenge blacksquare"
    " blacktriangle bm bmod boldsymbol bot bowtie box boxdot boxed boxminus boxplus boxtimes breve bullet bumpeq",
    "\x0b": "vDash varDelta varGamma varOmega varPhi varTheta varepsilon varkappa varnothing varphi varpi varrho varsigma vartheta vartriangle vdash"
    " vdots vec vee veebar verb vert vphantom vskip vspace",
    "\x0c": "fallingdotseq fbox fill flat flushleft flushright footnote footnotesize forall frac framebox frown",
    # TAB, CARRIAGE RETURN and LINE FEED have: only commands whose remainder is no word (TAB + "heta", but not TAB + "an" or LINE FEED + "eq").
    "\t": "tbinom text textbf textit textrm textsc textsf textstyle texttt tfrac therefore theta thickapprox tilde times triangle triangleq",
    "\r": "right rightarrow rightharpoonup rightleftharpoons rightsquigarrow",
    "\n": "nabla newline noindent nonumber notin nsubseteq",
}
_RESTORED = {escape + name[1:]: "\\" + name for escape, names in _COMMANDS.items() for name in names.split()}
_CANDIDATE = re.compile(r"[\x07\x08\x0b\x0c\t\r\n][A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class Repair(NamedTuple):
    r"""A text, the commands restored in it (``\boxed``, one entry each time) and the control characters left in it (``0x0C``)."""

    text: str
    commands: tuple[str, ...]
    left: tuple[str, ...]


def repair_latex(text: str) -> Repair:
    """``text`` with its mangled LaTeX commands restored."""
    commands: list[str] = []

    def restore(match: re.Match[str]) -> str:
        command = _RESTORED.get(match[0])
        # VERTICAL TAB is also the ligature "ff" of old TeX fonts: "co" + VERTICAL TAB + "ee" is coffee, not \vee.
        if command is None or (command == r"\vee" and re.search(r"[A-Za-z]{2}\Z", text[: match.start()][-2:])):
            return match[0]
        commands.append(command)
        return command

    repaired = _CANDIDATE.sub(restore, text)
    return Repair(repaired, tuple(commands), control_characters(repaired))


def as_it_is(text: str) -> Repair:
    """``text`` unchanged, its control characters counted."""
    return Repair(text, (), control_characters(text))


def control_characters(text: str) -> tuple[str, ...]:
    """The control characters in ``text`` other than TAB, LINE FEED and CARRIAGE RETURN, as ``0x0C``, one entry each time."""
    return tuple(f"0x{ord(character):02X}" for character in _CONTROL.findall(text))
