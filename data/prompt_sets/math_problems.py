"""Open prompts: word problems with small numbers."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _shopping(dice: Dice) -> Fill:
    first, second = dice.some(words.FRUITS, 2)
    return {
        "who": words.first_name(dice),
        "first": f"{dice.between(2, 12)} {first} at {dice.between(1, 9)} dollars each",
        "second": f"{dice.between(2, 12)} {second} at {dice.between(1, 9)} dollars each",
        "note": str(dice.one((50, 100, 200))),
    }


def _travel(dice: Dice) -> Fill:
    start, end = dice.some(words.CITIES, 2)
    return {
        "start": start,
        "end": end,
        "speed": str(dice.between(4, 14) * 10),
        "hours": str(dice.between(2, 9)),
        "rest": str(dice.between(1, 9) * 10),
    }


def _percent(dice: Dice) -> Fill:
    return {
        "thing": dice.one(words.PRODUCTS),
        "price": str(dice.between(2, 40) * 10),
        "percent": str(dice.between(1, 16) * 5),
        "kind": dice.one(("cheaper", "more expensive")),
    }


def _ages(dice: Dice) -> Fill:
    return {
        "first": words.first_name(dice),
        "last": words.person(dice),
        "age": str(dice.between(8, 40)),
        "gap": str(dice.between(2, 12)),
        "years": str(dice.between(2, 15)),
    }


def _area(dice: Dice) -> Fill:
    return {
        "room": dice.one(words.ROOMS),
        "length": str(dice.between(3, 24)),
        "width": str(dice.between(2, 18)),
        "cost": str(dice.between(2, 30)),
    }


def _equation(dice: Dice) -> Fill:
    return {"a": str(dice.between(2, 12)), "b": str(dice.between(1, 40)), "c": str(dice.between(20, 99))}


TEMPLATES = (
    Template(
        "math_shopping",
        "math",
        (
            "{who} buys {first} and {second}. How much change does {who} get from {note} dollars?",
            "A shopping bill: {first}, {second}. {who} pays with {note} dollars. What is left? Show the "
            "steps.",
            "{who} has {note} dollars and takes {first} and {second}. Work out what remains.",
        ),
        _shopping,
    ),
    Template(
        "math_travel",
        "math",
        (
            "A train from {start} to {end} drives {hours} hours at {speed} km/h, then {rest} km more. "
            "How far is that?",
            "From {start} to {end}: {hours} hours at {speed} km/h plus {rest} km. What is the total "
            "distance?",
            "I drove {hours} hours at {speed} km/h from {start} and had {rest} km left to {end}. How "
            "long is the way?",
        ),
        _travel,
    ),
    Template(
        "math_percent",
        "math",
        (
            "A {thing} costs {price} dollars and becomes {percent}% {kind}. What is the new price?",
            "What does a {thing} of {price} dollars cost when it is {percent}% {kind}? Show the steps.",
            "Price of a {thing}: {price} dollars. It gets {percent}% {kind}. Compute the new price.",
        ),
        _percent,
    ),
    Template(
        "math_ages",
        "math",
        (
            "{first} is {age}. {last} is {gap} years older. How old are they together in {years} years?",
            "{last} is {gap} years older than {first}, who is {age}. What is the sum of their ages after "
            "{years} years?",
            "In {years} years, how old will {first} (now {age}) and {last} ({gap} years older) be?",
        ),
        _ages,
    ),
    Template(
        "math_area",
        "math",
        (
            "The {room} is {length} m long and {width} m wide. What does a floor at {cost} dollars per "
            "square metre cost?",
            "Floor for the {room}: {length} m by {width} m, {cost} dollars per square metre. What is the "
            "price?",
        ),
        _area,
        held_out=True,
    ),
    Template(
        "math_equation",
        "math",
        ("Solve {a}x + {b} = {c} for x. Show each step.", "Find x: {a}x + {b} = {c}. Explain briefly."),
        _equation,
        held_out=True,
    ),
)
