"""Word lists that the templates draw from, and the entities whose fields stand in the structured prompts."""

from dataclasses import dataclass

from data.prompt_sets.template import Dice

FIRST_NAMES = (
    "Maria Tom Aisha Kenji Lena Omar Sofia Ivan Priya Noah Chloe Diego Hana Felix Zara Leo Nina Samuel "
    "Ingrid Marco "
    "Elif Peter Yara Victor Amara Oscar Julia Rafael Mina Hugo Alice Daniel Fatima George Clara Ravi "
    "Emma Lucas Olga Ben"
).split()
_LAST_NAMES = (
    "Lopez Becker Khan Tanaka Novak Haddad Rossi Petrov Patel Wright Dubois Garcia Sato Meyer Ali Costa "
    "Larsen Brown "
    "Kaya Moreau Silva Young Okafor Lind Weber Torres Cohen Fischer Adams Nowak Evans Murphy Reyes Olsen "
    "Grant Ward"
).split()
CITIES = (
    "Lisbon Oslo Nairobi Kyoto Denver Lyon Prague Lima Toronto Munich Dublin Cairo Perth Austin Warsaw "
    "Bogota Geneva "
    "Seoul Porto Boston Athens Quito Hanoi Leeds Turin Helsinki Madrid Chicago Naples Vienna"
).split()
COUNTRIES = (
    "Portugal Norway Kenya Japan Canada France Peru Germany Ireland Egypt Poland Italy Spain Greece Chile"
).split()
PRODUCTS = (
    "notebook, desk lamp, coffee mug, backpack, keyboard, water bottle, headphones, office chair, phone "
    "case, wool scarf, "
    "rain jacket, tea kettle, bike helmet, yoga mat, table fan, wall clock, toolbox, camera bag, picture "
    "frame, garden hose, "
    "pillow, candle, cutting board, USB cable, travel pillow, running shoes, sun hat, bread knife, board "
    "game, umbrella"
).split(", ")
FRUITS = "apples pears plums lemons onions carrots peaches melons tomatoes potatoes mangoes radishes".split()
JOBS = (
    "nurse, welder, teacher, architect, baker, pilot, lawyer, chemist, editor, plumber, dentist, farmer, "
    "librarian, "
    "engineer, designer, accountant, electrician, translator, chef, mechanic"
).split(", ")
TITLES = (
    "The Quiet Harbor, Glass River, Winter Letters, A Map of Rain, The Last Orchard, Silver Roads, Night "
    "Ferry, "
    "Paper Lanterns, The Salt House, Blue Meridian, Stone Garden, Northern Song, The Ninth Gate, Copper "
    "Sky, Small Fires"
).split(", ")
COMPANIES = (
    "Northwind Foods, Helio Labs, Brightwater, Cedar Systems, Atlas Freight, Bluefin Media, Orchard "
    "Bank, Quartz Energy, "
    "Lumen Health, Kestrel Air, Marble Hotels, Pine Software, Vertex Tools, Harbor Insurance, Delta Farms"
).split(", ")
TEAMS = (
    "Finance Sales Support Marketing Legal Research Design Logistics Security Training Purchasing Quality"
).split()
COLORS = "red green navy black white silver orange yellow brown purple teal gray".split()
LANGUAGES = "English Spanish French German Italian Portuguese Japanese Turkish Polish Dutch".split()
STATUSES = "open pending active closed shipped blocked ready delayed cancelled approved".split()
GENRES = "drama comedy thriller jazz rock fantasy mystery history folk documentary".split()
SPORTS = "tennis rowing hockey football cycling judo chess swimming volleyball rugby".split()
MATERIALS = "oak steel glass cotton leather bamboo ceramic plastic wool granite".split()
PLANTS = "fern basil tulip cactus maple lavender rose mint orchid ivy sage bamboo".split()
DISHES = (
    "lentil soup, apple pie, fried rice, fish tacos, mushroom risotto, beef stew, pancakes, bean chili, "
    "potato salad, "
    "carrot cake, tomato pasta, chicken curry"
).split(", ")
SUBJECTS = (
    "algebra, biology, painting, world history, chemistry, statistics, geography, music theory, "
    "economics, physics, "
    "creative writing, astronomy"
).split(", ")
EVENTS = (
    "team meeting, budget review, product launch, book club, yoga class, design workshop, code review, "
    "job interview, "
    "birthday party, press briefing, charity run, wine tasting, safety training, concert, parent evening"
).split(", ")
SERVICES = "auth billing search mailer gateway reports cache uploader scheduler metrics payments chat".split()
HOSTS = "alpha bravo cedar delta ember falcon granite harbor iris jasper kepler lotus".split()
ROOMS = "kitchen garage office attic cellar hall library bedroom lab warehouse greenhouse studio".split()
MONTHS = ("January February March April May June July August September October November December").split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

_POOLS: dict[str, list[str]] = {
    "first": FIRST_NAMES,
    "last": _LAST_NAMES,
    "city": CITIES,
    "country": COUNTRIES,
    "product": PRODUCTS,
    "title": TITLES,
    "company": COMPANIES,
    "team": TEAMS,
    "color": COLORS,
    "language": LANGUAGES,
    "status": STATUSES,
    "genre": GENRES,
    "sport": SPORTS,
    "material": MATERIALS,
    "plant": PLANTS,
    "dish": DISHES,
    "subject": SUBJECTS,
    "event": EVENTS,
    "service": SERVICES,
    "host": HOSTS,
    "room": ROOMS,
}

# Per field name:type, then what a value looks like: @pool, a range of numbers, or a pattern (# is a digit).
_ENTITY_FIELDS = {
    "Book": "title:str=@title author:str=@person pages:int=90-900 price:float=5-60 in_stock:bool "
    "published:date "
    "language:str=@language isbn:str=978-#######",
    "Customer": "name:str=@person email:str=@email age:int=18-80 city:str=@city phone:str=555-#### vip:bool "
    "joined:date balance:float=10-900",
    "Employee": "name:str=@person team:str=@team salary:float=2100-7800 hired:date remote:bool level:int=1-9 "
    "manager:str=@last badge:str=E-####",
    "Invoice": "number:str=INV-#### customer:str=@company total:float=40-980 paid:bool due_date:date "
    "items:int=1-30 "
    "currency:str=EUR tax:float=2-90",
    "Product": "name:str=@product price:float=3-240 stock:int=0-400 color:str=@color weight:float=1-40 "
    "active:bool "
    "sku:str=SKU-#### material:str=@material",
    "Student": "name:str=@person grade:int=1-12 subject:str=@subject score:float=40-99 enrolled:date "
    "active:bool "
    "mentor:str=@last room:str=R-##",
    "Movie": "title:str=@title director:str=@person year:int=1950-2024 rating:float=1-9 genre:str=@genre "
    "minutes:int=80-190 released:date streaming:bool",
    "Flight": "number:str=KA### origin:str=@city destination:str=@city gate:str=B## seats:int=60-320 "
    "delayed:bool "
    "departure:date price:float=50-900",
    "Hotel": "name:str=@company city:str=@city stars:int=1-5 rooms:int=12-400 price:float=40-350 "
    "breakfast:bool "
    "opened:date phone:str=555-####",
    "Car": "make:str=@company model:str=M-## year:int=1998-2024 color:str=@color mileage:int=900-160000 "
    "electric:bool "
    "price:float=2000-48000 plate:str=KX-####",
    "Server": "host:str=@host port:int=1024-9999 region:str=@city memory:int=4-256 active:bool "
    "owner:str=@last "
    "load:float=1-90 started:date",
    "Sensor": "id:str=S-### room:str=@room temperature:float=5-40 humidity:int=20-90 online:bool "
    "installed:date "
    "battery:int=1-100 unit:str=celsius",
    "Ticket": "id:str=T-#### subject:str=@event priority:int=1-5 status:str=@status assignee:str=@person "
    "created:date "
    "resolved:bool hours:float=1-40",
    "Course": "title:str=@subject teacher:str=@person credits:int=1-12 room:str=R-## online:bool "
    "start_date:date "
    "fee:float=50-900 capacity:int=8-120",
    "Order": "id:str=O-#### customer:str=@person product:str=@product quantity:int=1-24 "
    "price:float=3-250 shipped:bool "
    "order_date:date city:str=@city",
    "Song": "title:str=@title artist:str=@person album:str=@title seconds:int=120-420 genre:str=@genre "
    "plays:int=100-90000 "
    "explicit:bool released:date",
    "Player": "name:str=@person team:str=@city sport:str=@sport goals:int=0-60 height:float=1-2 "
    "injured:bool born:date "
    "number:int=1-99",
    "Patient": "name:str=@person age:int=1-95 ward:str=W-## weight:float=12-120 admitted:date insured:bool "
    "doctor:str=@last pulse:int=50-120",
    "Account": "owner:str=@person iban:str=DE#### balance:float=10-9000 currency:str=USD opened:date "
    "frozen:bool "
    "branch:str=@city limit:int=100-5000",
    "Event": "name:str=@event place:str=@city date:date guests:int=5-400 host:str=@person free:bool "
    "fee:float=5-90 "
    "room:str=@room",
    "Parcel": "code:str=P-##### sender:str=@company receiver:str=@person weight:float=1-30 "
    "city:str=@city sent:date "
    "delivered:bool stops:int=1-9",
    "Room": "name:str=@room floor:int=0-12 area:float=8-90 windows:int=0-8 heated:bool color:str=@color "
    "painted:date "
    "material:str=@material",
    "Plant": "name:str=@plant height:float=1-90 color:str=@color planted:date indoor:bool "
    "price:float=3-45 pots:int=1-40 "
    "country:str=@country",
    "Device": "serial:str=DX-#### kind:str=@product owner:str=@person battery:int=1-100 online:bool "
    "bought:date "
    "room:str=@room cost:float=20-900",
    "Task": "title:str=@event owner:str=@person priority:int=1-5 done:bool due_date:date hours:float=1-30 "
    "project:str=@company status:str=@status",
    "Restaurant": "name:str=@company city:str=@city tables:int=4-60 rating:float=1-5 dish:str=@dish "
    "vegan:bool opened:date "
    "phone:str=555-####",
    "Recipe": "name:str=@dish minutes:int=10-180 servings:int=1-12 author:str=@person vegan:bool "
    "calories:int=90-900 "
    "rating:float=1-5 added:date",
    "Loan": "id:str=L-#### borrower:str=@person amount:float=500-90000 rate:float=1-9 months:int=6-120 "
    "approved:bool "
    "start_date:date bank:str=@company",
}


@dataclass(frozen=True)
class Field:
    """One field of an entity. `type` is one of str, int, float, bool and date."""

    name: str
    type: str
    values: str

    def value(self, dice: Dice) -> str:
        """A plausible value as plain text, such as 12, 4.50, true, 2024-03-09 or Lisbon."""
        if self.type == "bool":
            return dice.one(("true", "false"))
        if self.type == "date":
            return date(dice)
        if self.type in ("int", "float"):
            low, high = (int(bound) for bound in self.values.split("-"))
            whole = dice.between(low, high)
            return str(whole) if self.type == "int" else f"{whole}.{dice.between(1, 9)}"
        if self.values == "@person":
            return person(dice)
        if self.values == "@email":
            return f"{dice.one(FIRST_NAMES).lower()}@{dice.one(HOSTS)}.com"
        if self.values.startswith("@"):
            return dice.one(_POOLS[self.values[1:]])
        return dice.digits(self.values)


def _parse_field(text: str) -> Field:
    name, _, rest = text.partition(":")
    kind, _, values = rest.partition("=")
    return Field(name, kind, values)


ENTITIES: dict[str, tuple[Field, ...]] = {
    name: tuple(_parse_field(field) for field in fields.split()) for name, fields in _ENTITY_FIELDS.items()
}


def person(dice: Dice) -> str:
    """A first and a last name."""
    return f"{dice.one(FIRST_NAMES)} {dice.one(_LAST_NAMES)}"


def first_name(dice: Dice) -> str:
    """A first name."""
    return dice.one(FIRST_NAMES)


def date(dice: Dice) -> str:
    """A date such as 2024-03-09."""
    return f"{dice.between(2015, 2025)}-{dice.between(1, 12):02d}-{dice.between(1, 28):02d}"


def entity(dice: Dice, low: int = 3, high: int = 5) -> tuple[str, list[Field]]:
    """An entity's name and `low` to `high` of its fields in random order."""
    name = dice.one(tuple(ENTITIES))
    return name, dice.some(ENTITIES[name], dice.between(low, high))


def number_field(dice: Dice, name: str) -> Field:
    """One of an entity's fields that holds a number."""
    return dice.one([field for field in ENTITIES[name] if field.type in ("int", "float")])


def text_field(dice: Dice, name: str) -> Field:
    """One of an entity's fields that holds a text."""
    return dice.one([field for field in ENTITIES[name] if field.type == "str"])


def listed(parts: list[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def plural(name: str) -> str:
    """A table name for an entity: lower case plural."""
    lower = name.lower()
    return lower[:-1] + "ies" if lower.endswith("y") else lower + "s"
