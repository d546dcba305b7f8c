"""Word problems of several steps, and small puzzles of logic."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template


def _wages(dice: Dice) -> Fill:
    return {
        "who": words.first_name(dice),
        "job": dice.one(words.JOBS),
        "hours": str(dice.between(3, 9)),
        "days": str(dice.between(2, 6)),
        "pay": str(dice.between(8, 40)),
        "extra": str(dice.between(2, 10) * 5),
        "percent": str(dice.one((10, 20, 25, 50))),
    }


def _sharing(dice: Dice) -> Fill:
    first, second, third = dice.some(words.FIRST_NAMES, 3)
    return {
        "first": first,
        "second": second,
        "third": third,
        "fruit": dice.one(words.FRUITS),
        "n": str(dice.between(6, 48)),
        "times": dice.one(("twice", "three times", "half", "four times")),
        "more": str(dice.between(2, 15)),
    }


def _supplies(dice: Dice) -> Fill:
    return {
        "who": words.first_name(dice),
        "a": str(dice.between(2, 30) * 10),
        "percent": str(dice.one((20, 25, 40, 50, 75))),
        "thing": dice.one(words.PRODUCTS),
        "count": str(dice.between(2, 9)),
        "months": str(dice.between(2, 12)),
    }


def _order(dice: Dice) -> Fill:
    first, second, third, fourth = dice.some(words.FIRST_NAMES, 4)
    return {
        "a": first,
        "b": second,
        "c": third,
        "d": fourth,
        "more": dice.one(("taller", "older", "faster", "richer", "younger")),
    }


TEMPLATES = (
    Template(
        "puzzle_wages",
        "puzzle",
        (
            "{who} works {hours} hours a day as a {job} for {pay} dollars an hour, {days} days a week. On "
            "the last day there is a bonus of {extra} dollars. How much does {who} earn in a week?",
            "A {job} named {who} earns {pay} dollars an hour and works {hours} hours on each of {days} "
            "days. {percent}% of it goes to rent. How much is left?",
        ),
        _wages,
    ),
    Template(
        "puzzle_sharing",
        "puzzle",
        (
            "{first} has {n} {fruit}. {second} has {times} as many, and {third} has {more} more than "
            "{second}. How many {fruit} do they have together?",
            "{second} picked {times} as many {fruit} as {first}, who picked {n}. {third} picked {more}. How "
            "many {fruit} are there in total?",
        ),
        _sharing,
    ),
    Template(
        "puzzle_supplies",
        "puzzle",
        (
            "{who} pays {a} dollars for supplies. A {thing} costs {percent}% more than the supplies. How "
            "much does {who} spend in total?",
            "{who} saves {a} dollars a month for {months} months and then buys {count} pieces, each a "
            "{thing} of {percent} dollars. How much money remains?",
        ),
        _supplies,
    ),
    Template(
        "puzzle_order",
        "puzzle",
        (
            "{a} is {more} than {b}. {b} is {more} than {c}. {d} is {more} than {a}. Who is the {more} of "
            "{c} and {d}? Explain.",
            "In a group, {a} is {more} than {b}, and {c} is {more} than {a} but not than {d}. Put all four "
            "in order.",
        ),
        _order,
        held_out=True,
    ),
)
