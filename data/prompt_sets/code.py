"""Open prompts: small functions and explanations of code."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_RESULTS = (
    "sum",
    "product",
    "largest",
    "smallest",
    "average",
    "number",
    "last",
    "sorted list",
    "set",
    "square of the sum",
)
_NUMBERS = (
    "even numbers",
    "odd numbers",
    "positive numbers",
    "negative numbers",
    "multiples of {n}",
    "numbers above {n}",
    "numbers below {n}",
    "numbers that end in {n}",
)
_CHARACTERS = (
    "vowels",
    "consonants",
    "digits",
    "spaces",
    "capital letters",
    "commas",
    "letters {letter}",
    "words",
)
_STRING_ACTIONS = (
    "counts the",
    "removes the",
    "doubles the",
    "moves to the front the",
    "lists the",
    "replaces by a star the",
)
_LANGUAGES = ("JavaScript", "Java", "Ruby", "Go", "C")
_TOOLS = ("grep", "sed", "awk", "find", "sort", "cut", "tar", "wc")


def _list_function(dice: Dice) -> Fill:
    return {
        "result": dice.one(_RESULTS),
        "numbers": dice.one(_NUMBERS).format(n=dice.between(2, 9)),
        "holder": dice.one(("list", "tuple", "list of lists", "dictionary's values")),
    }


def _string_function(dice: Dice) -> Fill:
    return {
        "action": dice.one(_STRING_ACTIONS),
        "characters": dice.one(_CHARACTERS).format(letter=dice.one("aeiost")),
        "text": dice.one(
            ("a string", "a sentence", "a file name", "every line of a text", "a list of strings")
        ),
    }


def _record_function(dice: Dice) -> Fill:
    name = dice.one(tuple(words.ENTITIES))
    number = dice.one([f for f in words.ENTITIES[name] if f.type in ("int", "float")])
    label = dice.one([f for f in words.ENTITIES[name] if f.type == "str"])
    return {
        "many": words.plural(name),
        "number": number.name,
        "label": label.name,
        "action": dice.one(("sorts", "filters by a minimum of", "groups", "adds up")),
    }


def _loop(dice: Dice) -> Fill:
    step, start = dice.between(1, 5), dice.between(0, 9)
    body = dice.one(
        ("total += i", "total += i * i", "total -= i", "total *= 2", "print(i)", "total = i - total")
    )
    line = f"for i in range({start}, {start + dice.between(3, 9) * step}, {step}): {body}"
    return {"line": line}


def _other_language(dice: Dice) -> Fill:
    return {"language": dice.one(_LANGUAGES), **_list_function(dice)}


def _shell(dice: Dice) -> Fill:
    return {
        "tool": dice.one(_TOOLS),
        "kind": dice.one(("log", "csv", "txt", "py", "json")),
        "place": dice.one(words.HOSTS),
        "word": dice.one(words.STATUSES),
    }


TEMPLATES = (
    Template(
        "code_list_function",
        "code",
        (
            "Write a Python function that returns the {result} of the {numbers} in a {holder}. Code only.",
            "Python: from a {holder}, take the {numbers} and return their {result}. Only the function.",
            "I need a short Python function for the {result} of all {numbers} of a {holder}.",
        ),
        _list_function,
    ),
    Template(
        "code_string_function",
        "code",
        (
            "Write a Python function that {action} {characters} in {text}. Code only.",
            "A short Python function, please: it {action} {characters} in {text}.",
            "Python function that takes {text} and {action} {characters}. No explanation.",
        ),
        _string_function,
    ),
    Template(
        "code_record_function",
        "code",
        (
            "Write a Python function that {action} the {number} of a list of {many} (dicts with {label} "
            "and {number}).",
            "Given {many} as dicts with {label} and {number}, write a Python function that {action} the "
            "{number}. Code only.",
        ),
        _record_function,
    ),
    Template(
        "code_explain_loop",
        "code",
        (
            "What does this Python line do? `{line}` Answer in two sentences.",
            "Explain briefly: `{line}`",
        ),
        _loop,
    ),
    Template(
        "code_other_language",
        "code",
        (
            "Write a {language} function that returns the {result} of the {numbers} in an array (from a "
            "{holder}).",
            "{language} code only: the {result} of all {numbers} of a {holder}.",
        ),
        _other_language,
        held_out=True,
    ),
    Template(
        "code_shell",
        "code",
        (
            "Which shell command with {tool} handles the .{kind} files in {place} that contain the word "
            "{word}?",
            "Give me one line of bash with {tool} for {kind} files under {place} and the word {word}, "
            "and say what it does.",
        ),
        _shell,
        held_out=True,
    ),
)
