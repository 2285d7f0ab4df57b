"""Limit the number of phrases that read like a literal translation.

`python tests/test_voice.py [path ...]` lists the places and their number per pattern and folder.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

BOUNDS = {
    "benchmarks": 1,
    "docs": 0,
    "examples": 1,
    "lightning_gputime": 0,
    "lightning_gputime/_auto_instrumentation": 4,
    "lightning_gputime/_causes": 0,
    "lightning_gputime/_compat": 0,
    "lightning_gputime/_culprits": 0,
    "lightning_gputime/_diagnosis": 0,
    "lightning_gputime/_instrumentation": 0,
    "lightning_gputime/_measurement": 0,
    "lightning_gputime/_output": 0,
    "lightning_gputime/_record": 0,
    "lightning_gputime/_runs": 0,
    "lightning_gputime/_session": 0,
    "tests": 10,
    "top": 0,
}
"""Places per room. Only lower these numbers."""

QUESTION = r"(?:What|Which|Whether|Who|Whom|Whose|Where|When|How)\b(?! to\b)"

COMMENT = re.compile(rf"#:?\s*(?:Of|Those|{QUESTION})")

DOCSTRINGS = {
    "docstring opens with a question word": rf"\A\s*{QUESTION}",
    "argument opens with a question word": rf"^\s+\*{{0,2}}\w+: {QUESTION}",
}

PROSE = {
    "one as a noun": r"(?<!torch\.)\bones\b|\bone's\b"
    r"|\bone(?=[.;:)]| (?:that|which|whose|is|has)\b)",
    "own as a filler": r"\bof (?:one's|its|their|your|our) own\b|\bof (?:ours|theirs|the user's)\b",
    "no agent": r"\b(?:is|are|was|were|be|been|not|never|nothing|what|as)"
    r" (?:told|said|seen|known|noted|judged)\b",
    "negation": r"\bneeds? not\b|\bnone of\b|\b(?:has|have|had|is|are) none\b|, nor\b",
    "opening": r"(?:^|[.:] )It is \w+ that\b|\bThere (?:is|are)\b[^.]*\bwhich\b",
    "old word": r"(?i)\b(?:mend(?:s|ed|ing)?|beside|dear(?:er|est)?|for ever|so many|as many as"
    r"|hence|at rest|go(?:es)? on|com(?:es?|ing) off|tak(?:es?|en) off|stands?|bears?|turns|holds"
    r"|behind(?! a spin)|upon|(?:the|a) whole(?= *(?:[.,;:)]|$|of)))\b",
}

NAMES = {
    "variable one": r"\A(?:one|ones|such|those|who|what|whose)\Z",
    "riddle of a constant": r"\A_?(?:[A-Z_]+_)?(?:WORTH_IT|WORTH_A_LOOK|ENOUGH|PATIENCE|LONG|SHORT"
    r"|LEAST|MOST|FEW|MANY|SURE)\Z",
    "test name": r"\Atest_(?:what|which|whether|who|whose|of|to|that|one|nobody|where|how)_\w+"
    r"|\Atest_\w+_(?:told|said|seen|known|noted|judged|own|ours|it|none|one|so|too)\Z",
}


def search(rules: dict[str, str], text: str, line: int) -> Iterator[tuple[int, str, str]]:
    """Yield line, pattern and phrase for each match in a text that starts at a line."""
    for kind, rule in rules.items():
        for found in re.finditer(rule, text, re.MULTILINE):
            yield line + text.count("\n", 0, found.end()), kind, found[0].strip()


def python(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, pattern and phrase for each place in names, strings and comments."""
    tree = ast.parse(text)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield from search(NAMES, name, node.lineno)
            case ast.Name(id=name, ctx=ast.Store()):
                yield from search(NAMES, name, node.lineno)
            case ast.Constant(value=str(content)):
                rules = PROSE | DOCSTRINGS if id(node) in statements else PROSE
                yield from search(rules, content, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from search(PROSE, token.string, token.start[0])
            if found := COMMENT.match(token.string):
                yield token.start[0], "comment opens with Of or a question word", found[0]


def markdown(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, pattern and phrase for each place in prose outside code blocks."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    yield from search(PROSE, text, 1)


def places() -> Iterator[tuple[str, str]]:
    """Yield the room and the description of each place."""
    tops = ("lightning_gputime", "tests", "docs", "examples", "benchmarks")
    paths = [*ROOT.glob("*.md"), *(path for top in tops for path in (ROOT / top).rglob("*"))]
    for path in sorted(paths):
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[: 2 if parts[0] == "lightning_gputime" else 1][: len(parts) - 1])
        read = {".py": python, ".md": markdown}.get(path.suffix)
        if read is not None and path.name != Path(__file__).name:
            for line, kind, phrase in read(path.read_text()):
                yield room or "top", f"{'/'.join(parts)}:{line}: {kind}: {phrase!r}"


def test_no_room_has_more_phrases_than_its_bound() -> None:
    counts = Counter(room for room, _ in places())
    assert {room: n for room, n in counts.items() if n > BOUNDS.get(room, 0)} == {}


if __name__ == "__main__":
    found = [place for place in places() if place[1].startswith(tuple(sys.argv[1:]) or "")]
    print(*(text for _, text in found), sep="\n")
    kinds = Counter(text.split(": ")[1] for _, text in found)
    for counts in (kinds, Counter(room for room, _ in found)):
        print("", *(f"{n:6} {name}" for name, n in counts.most_common()), sep="\n")
    print(f"{len(found):6} in all")
