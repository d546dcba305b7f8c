"""Longer open prompts: explanations of notions, texts of many kinds, and speaking as somebody else."""

from data.prompt_sets import topics
from data.prompt_sets.template import Dice, Fill, Template

_NOTIONS = (*topics.SCIENCE, *topics.SOCIETY, *topics.HISTORY)


def _notion(dice: Dice) -> Fill:
    field = dice.one((topics.SCIENCE, topics.SOCIETY, topics.HISTORY, topics.TECHNOLOGY))
    return {"notion": dice.one(field), "count": dice.one(("two", "three", "four", "five"))}


def _two_notions(dice: Dice) -> Fill:
    first, second = dice.some(dice.one((topics.SCIENCE, topics.SOCIETY, topics.HISTORY)), 2)
    return {"first": first, "second": second}


def _two_people(dice: Dice) -> Fill:
    first, second = dice.some(dice.one((topics.PEOPLE, topics.PLACES, topics.BOOKS)), 2)
    return {"first": first, "second": second}


def _piece(dice: Dice) -> Fill:
    return {
        "piece": dice.one(topics.PIECES),
        "occasion": dice.one(topics.OCCASIONS),
        "limit": str(dice.between(2, 20) * 10),
    }


def _speaker(dice: Dice) -> Fill:
    return {"speaker": dice.one(topics.SPEAKERS), "matter": dice.one(topics.MATTERS)}


def _steps(dice: Dice) -> Fill:
    deeds = "organize; write; film; plan; describe; prepare a talk about; teach children about".split("; ")
    return {"deed": dice.one(deeds), "occasion": dice.one(topics.OCCASIONS)}


TEMPLATES = (
    Template(
        "essay_explain",
        "essay",
        (
            "Explain {notion} and name {count} examples.",
            "What are {count} effects of {notion}?",
            "Describe {notion} and why it matters.",
            "Give an overview of {notion}, in {count} points.",
            "Discuss the advantages and disadvantages of {notion}.",
        ),
        _notion,
    ),
    Template(
        "essay_relate",
        "essay",
        (
            "How are {first} and {second} related?",
            "What is the difference between {first} and {second}?",
            "Provide insights into the connection between {first} and {second}.",
            "Define {first} and {second}, and explain how they affect each other.",
        ),
        _two_notions,
    ),
    Template(
        "essay_compare",
        "essay",
        (
            "Compare {first} and {second}.",
            "What do {first} and {second} have in common?",
            "Which is better known, {first} or {second}, and why?",
        ),
        _two_people,
        held_out=True,
    ),
    Template(
        "writing_piece",
        "writing",
        (
            "Write {piece} about {occasion}.",
            "Compose {piece} about {occasion} in about {limit} words.",
            "Could you write {piece} for {occasion}? Use fewer than {limit} words.",
            "Draft {piece} on the subject of {occasion}. Make it engaging.",
        ),
        _piece,
    ),
    Template(
        "writing_role",
        "writing",
        (
            "Pretend to be {speaker} and talk about {matter}.",
            "You are {speaker}. What do you think about {matter}?",
            "Imagine you are {speaker}. Speak like that as much as you can: tell me about {matter}.",
            "Answer as {speaker} would: what can you say about {matter}?",
        ),
        _speaker,
    ),
    Template(
        "writing_steps",
        "writing",
        (
            "I want to {deed} {occasion}. Give me a plan.",
            "How would you {deed} {occasion}? Step by step, please.",
        ),
        _steps,
        held_out=True,
    ),
)
