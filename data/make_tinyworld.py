"""Make the tiny world: a fictional encyclopedia, its questions need 0, 1, 2 or 3 searches.

    python data/make_tinyworld.py  # writes data/tinyworld/, byte for byte as shipped
    python data/make_tinyworld.py --seed 7 --out FOLDER  # another world of the same kind
    python data/make_tinyworld.py --deep --out FOLDER  # with questions that need 4 searches

Two worlds are written, one to train on and one to be measured on, each with a corpus and questions.
Names are two words; a fifth of all word pairs is kept for the dev world, so no dev name stands in
any training text. A fact is a sentence in the passage about its subject, so a chain of k facts
takes k searches: the name to search for next is only known after reading. Famous facts (0 searches)
are the same in both worlds: the tiny model was taught them.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing import files  # noqa: E402
from retriever import BM25  # noqa: E402

FIRST_WORDS = """Amber Ivory Scarlet Silver Golden Crimson Cobalt Copper Velvet Marble Cedar Willow
Hazel Juniper Laurel Olive Rowan Aspen Birch Maple Robin Wren Falcon Raven Heron Lark Sparrow Jasper
Opal Pearl Ruby Garnet Onyx Coral Jade Topaz Flint Alden Brynn Corin Dalia Edric Fenna Galen Hollis
Idris Jorah Kelda Loric Mirela Nolan Orson Perrin Quilla Rhea Silas Tamsin Ulric Vesna Wystan Yara
Zelda Autumn Winter Summer Dawn Dusk Lunar Solar Stella Nova Comet Misty Windy Stormy Frosty Sunny
Quiet Hidden Broken Ancient Bright Gentle Proud Noble Royal Humble Merry Swift Bold Clever Lucky
Roaming Silent Whispering Dancing Sleeping Burning Frozen Painted Gilded Thorny Mossy Sandy Rocky
Grassy Leafy Foggy Arden Basil Cyrus Della Elias Flora Gideon Hester Ivor Judith Kester
Lorna""".split()

SECOND_WORDS = """Marsh Brook Hollow Field Stone Vale Wood Harbor Bridge Tower Meadow Orchard Garden
Ridge Crest Shore Bay Cape Haven Ford Mill Gate Lane Grove Glen Dale Moor Heath Fell Crag Cliff Well
Falls Reach Bend Point Hill March Forest Thicket Prairie Canyon Gorge Cavern Grotto Island Lagoon
Delta Bluff Knoll Summit Plateau Pass Trail Crossing Landing Market Chapel Abbey Castle Keep Fort
Wall Arch Court Hall Manor Lodge Cottage Barn Stable Anvil Hammer Lantern Candle Mirror Feather
Arrow Shield Crown Scepter Banner Anchor Compass Rudder Sail Oar Net Hook Bell Drum Fiddle Harp
Flute Horn Quill Ribbon Thimble Needle Loom Spindle Basket Kettle Goblet Saddle Bridle Wagon Cart
Wheel Plough Sickle Acorn Thistle Clover Bramble Ivy Fern Reed Rush Heather""".split()

FAMOUS_FIRST = """Aurelon Belisar Cantor Dorvane Elmira Faustin Gorvan Hesper Isolde Jovian Karsten
Leandra Morvath Nerissa Octavia Palamon Quentin Rosalba Seraph Theron Ursula Valerian Wenzel
Xanthe""".split()

FAMOUS_SECOND = """Abendroth Bellweather Crowhurst Dunmore Eisenmark Fairbairn Greystoke Hawthorn
Inglenook Jessamine Kingsley Lorimer Mandeville Nightshade Oakenshaw Pemberton Quillfeather
Ravenscroft Silverlake Thornbury Underwood Vandermeer Winterbourne Yellowstone""".split()


@dataclass(frozen=True)
class Relation:
    """A kind of fact. The word before the value differs in every sentence, so that a quotation can
    be continued.
    """

    subject: str
    object: str
    nouns: tuple[str, str]  # the first is also the keyword of the query; questions use either
    sentence: str  # {x} subject, {y} value, {d} a detail of the subject


RELATIONS = {
    "author": Relation(
        "book", "person", ("author", "writer"), "{x} is a {d} novel by the author {y}."
    ),
    "director": Relation(
        "film", "person", ("director", "filmmaker"), "{x} is a {d} film made by the director {y}."
    ),
    "singer": Relation(
        "band", "person", ("singer", "vocalist"), "{x} is a {d} band around the singer {y}."
    ),
    "founder": Relation(
        "company", "person", ("founder", "creator"), "{x} is a {d} company of the founder {y}."
    ),
    "birthplace": Relation(
        "person", "city", ("birthplace", "hometown"), "The {d} {x} was born in {y}."
    ),
    "spouse": Relation("person", "person", ("spouse", "partner"), "The {d} {x} is married to {y}."),
    "teacher": Relation(
        "person", "person", ("teacher", "mentor"), "The {d} {x} studied under {y}."
    ),
    "country": Relation("city", "country", ("country", "nation"), "{x} is a {d} city within {y}."),
    "river": Relation(
        "city", "river", ("river", "waterway"), "The city {x} stands on the river {y}."
    ),
    "source": Relation(
        "river", "lake", ("source", "origin"), "{x} is a {d} river that begins at {y}."
    ),
    "ruler": Relation(
        "country", "person", ("ruler", "monarch"), "{x} is a {d} country led by the ruler {y}."
    ),
    "mountain": Relation(
        "lake", "mountain", ("mountain", "height"), "{x} is a {d} lake below the mountain {y}."
    ),
    "climber": Relation(
        "mountain",
        "person",
        ("climber", "alpinist"),
        "{x} is a {d} rock first scaled by the climber {y}.",
    ),
}
# The relation of the hard questions; its value stands in one of a person's papers
GRAVE = ("grave", "tomb")
PAPERS = ("diary", "letter", "will", "memoir", "ledger", "poem", "notebook")
GRAVE_SENTENCE = "The {paper} of {x} places the grave near {y}."
PAPER_SENTENCE = "The {paper} of {x} tells of {topic}."
TOPICS = ("weather", "music", "trade", "food", "ships", "horses")

DETAILS = {
    "book": ("short", "long", "celebrated", "forgotten"),
    "film": ("short", "long", "celebrated", "forgotten"),
    "band": ("loud", "cheerful", "celebrated", "forgotten"),
    "company": ("small", "large", "wealthy", "modest"),
    "person": ("painter", "farmer", "lawyer", "sailor", "baker", "soldier"),
    "city": ("small", "large", "wealthy", "modest"),
    "river": ("slow", "deep", "narrow", "wide"),
    "lake": ("deep", "round", "narrow", "wide"),
    "country": ("small", "large", "wealthy", "modest"),
    "mountain": ("steep", "high", "bare", "gray"),
}

FRAMES = ("{wh} {np}?", "Name {np}.", "Please find {np}.", "Can you name {np}?")
FORWARD_FRAMES = ("Take {x} and find {steps}.", "Begin with {x} and look up {steps}.")
FAMOUS_FRAMES = (
    "As everybody knows, {wh} {np}?",
    "From memory, {wh} {np}?",
    "Common knowledge: {wh} {np}?",
    "An easy quiz: {wh} {np}?",
)
FORWARD_SHARE = 0.3  # of the questions that name the chain from its start

# passages per type; persons are the hubs of the chains
SIZES = {
    "book": 150,
    "film": 150,
    "band": 150,
    "company": 150,
    "person": 560,
    "city": 200,
    "country": 50,
    "river": 60,
    "lake": 50,
    "mountain": 50,
}
HARD_PEOPLE = {"train": 200, "dev": 130}
QUESTIONS = {
    "train": {"0": 440, "1": 600, "2": 600, "3": 600, "hard": 260},
    "dev": {"0": 115, "1": 120, "2": 120, "3": 120, "hard": 120},
}
DEEP = {"train": {"4": 600}, "dev": {"4": 120}}


@dataclass
class World:
    """Facts and passages of one world; `facts[name][relation] = value`,
    `evidence[name, relation] = sentence`.
    """

    facts: dict = field(default_factory=dict)
    evidence: dict = field(default_factory=dict)
    passages: list = field(default_factory=list)  # {"id", "title", "text"}
    graves: dict = field(default_factory=dict)  # person -> (paper, place)
    by_type: dict = field(default_factory=dict)


def name_pairs(split):
    """All two-word names of a split, in a fixed order: a fifth of the pairs is dev, by position in
    the grid.
    """
    pairs = [(i, j) for i in range(len(FIRST_WORDS)) for j in range(len(SECOND_WORDS))]
    is_dev = [(i + 2 * j) % 5 == 0 for i, j in pairs]
    return [
        f"{FIRST_WORDS[i]} {SECOND_WORDS[j]}"
        for (i, j), dev in zip(pairs, is_dev)
        if dev == (split == "dev")
    ]


def add_entity(world, rng, name, kind, values):
    """Give `name` its facts and its passage. values: list of (relation, value)."""
    detail = rng.choice(DETAILS[kind])
    sentences = []
    for relation, value in values:
        sentence = RELATIONS[relation].sentence.format(x=name, y=value, d=detail)
        world.facts.setdefault(name, {})[relation] = value
        world.evidence[name, relation] = sentence
        sentences.append(sentence)
    world.passages.append({"title": name, "text": " ".join(sentences)})


def add_famous(world):
    """The famous books, people and cities: the same facts in every world, whatever its seed."""
    rng = random.Random(0)
    pairs = [f"{a} {b}" for a in FAMOUS_FIRST for b in FAMOUS_SECOND]
    names = rng.sample(pairs, 84)
    books, people, cities, countries = names[:24], names[24:48], names[48:72], names[72:]
    for i in range(24):
        add_entity(world, rng, books[i], "book", [("author", people[i])])
        add_entity(world, rng, people[i], "person", [("birthplace", cities[i])])
        add_entity(world, rng, cities[i], "city", [("country", countries[i % 12])])
    return [(name, relation) for name in books + people + cities for relation in world.facts[name]]


def make_world(rng, names, sizes=None, num_hard=0):
    """Draw a world. names: candidates for entity names (two words each, no repeats).

    Returns a `World`; raises ValueError when there are too few names.
    """
    sizes = sizes or SIZES
    world = World()
    if sum(sizes.values()) > len(names):
        raise ValueError(
            f"a world of {sum(sizes.values())} names needs more than {len(names)} word pairs"
        )
    drawn = rng.sample(names, sum(sizes.values()))
    for kind, size in sizes.items():
        world.by_type[kind], drawn = drawn[:size], drawn[size:]
    for kind, members in world.by_type.items():
        relations = [r for r, relation in RELATIONS.items() if relation.subject == kind]
        for name in members:
            values = []
            for relation in relations:
                others = [
                    v for v in rng.sample(world.by_type[RELATIONS[relation].object], 2) if v != name
                ]
                values.append((relation, others[0]))
            # Two sentences a passage: the birthplace, and either the spouse or the teacher
            if kind == "person":
                values.pop(rng.choice([1, 2]))
            add_entity(world, rng, name, kind, values)
    add_famous(world)
    for person in rng.sample(world.by_type["person"], num_hard):
        add_papers(world, rng, person)
    rng.shuffle(world.passages)
    for i, passage in enumerate(world.passages):
        passage["id"] = str(i)
    return world


def add_papers(world, rng, person):
    """A person's papers: one of them tells where the grave is, and only its keyword brings it to
    the top.
    """
    grave_paper, place = rng.choice(PAPERS), rng.choice(world.by_type["city"])
    for paper in PAPERS:
        if paper == grave_paper:
            text = GRAVE_SENTENCE.format(paper=paper, x=person, y=place)
        else:
            text = PAPER_SENTENCE.format(paper=paper, x=person, topic=rng.choice(TOPICS))
        world.passages.append({"title": f"{paper.capitalize()} of {person}", "text": text})
    world.graves[person] = (grave_paper, place)


def sample_chain(rng, world, length):
    """A random walk over the facts. Returns (start, [relations], [subjects], answer), or None at a
    dead end.
    """
    kind = rng.choice(list(world.by_type))
    subject = rng.choice(world.by_type[kind])
    relations, subjects = [], []
    for _ in range(length):
        choices = [r for r in world.facts.get(subject, {}) if r not in relations]
        if not choices:
            return None
        relations.append(rng.choice(choices))
        subjects.append(subject)
        subject = world.facts[subject][relations[-1]]
    if subject in subjects:
        return None
    return subjects[0], relations, subjects, subject


def sample_hard(rng, world, length):
    """A question for a grave: directly (length 1), or by way of a fact whose value is the person
    (length 2).
    """
    person = rng.choice(list(world.graves))
    if length == 1:
        return person, ["grave"], [person], world.graves[person][1]
    sources = [
        (s, r) for s, facts in world.facts.items() for r, value in facts.items() if value == person
    ]
    if not sources:
        return None
    start, relation = rng.choice(sources)
    return start, [relation, "grave"], [start, person], world.graves[person][1]


def nouns_of(relation):
    return GRAVE if relation == "grave" else RELATIONS[relation].nouns


def ask(rng, start, relations, famous=False):
    """Put a chain into words, e.g. `Who is the author of Amber Quill?`."""
    nouns = [rng.choice(nouns_of(relation)) for relation in relations]
    if not famous and rng.random() < FORWARD_SHARE:
        steps = ", then ".join(f"the {noun}" for noun in nouns)
        return rng.choice(FORWARD_FRAMES).format(x=start, steps=steps)
    phrase = "".join(f"the {noun} of " for noun in reversed(nouns)) + start
    last = relations[-1]
    wh = (
        "Where is"
        if last == "grave"
        else "Who is"
        if RELATIONS[last].object == "person"
        else "What is"
    )
    frame = rng.choice(FAMOUS_FRAMES if famous else FRAMES)
    return frame.format(wh=wh.lower() if not frame.startswith("{wh}") else wh, np=phrase)


def oracle_queries(world, relations, subjects):
    """The queries that find each fact of the chain, in order: the subject's name and the fact's
    keyword.
    """
    keywords = [world.graves[s][0] if r == "grave" else r for s, r in zip(subjects, relations)]
    return [f"{subject} {keyword}" for subject, keyword in zip(subjects, keywords)]


def evidence_titles(world, relations, subjects):
    """The titles of the passages that hold the chain's facts, in order."""
    return [
        f"{world.graves[s][0].capitalize()} of {s}" if r == "grave" else s
        for s, r in zip(subjects, relations)
    ]


def needs_all_searches(world, retriever, relations, subjects):
    """True if the query for each fact brings its own passage and no later one of the chain: no
    search can be saved.

    Queries with and without the fact's keyword are tried.
    """
    titles = evidence_titles(world, relations, subjects)
    for queries in (oracle_queries(world, relations, subjects), titles):
        for i, found in enumerate(retriever.search(queries, 3)):
            shown = {passage["title"] for passage in found}
            if titles[i] not in shown or shown & set(titles[i + 1 :]):
                return False
    return True


def make_questions(rng, world, split, numbers):
    """So many questions of each group, shuffled; dicts as in the questions file."""
    retriever = BM25(world.passages)
    questions, seen = [], set()

    def add(group, text, answer, titles, hops):
        if text in seen:
            return False
        seen.add(text)
        metadata = {"hops": hops, "supporting_titles": titles}
        if group == "hard":
            metadata["hard"] = True
        questions.append({"question": text, "golden_answers": [answer], "metadata": metadata})
        return True

    for text, name, relation in famous_questions(split)[: numbers["0"]]:
        add("0", text, world.facts[name][relation], [name], 0)
    for group, missing in list(numbers.items())[1:]:
        while missing:
            hops = rng.choice([1, 2]) if group == "hard" else int(group)
            chain = (sample_hard if group == "hard" else sample_chain)(rng, world, hops)
            if chain is None or not needs_all_searches(world, retriever, chain[1], chain[2]):
                continue
            start, relations, subjects, answer = chain
            missing -= add(
                group,
                ask(rng, start, relations),
                answer,
                evidence_titles(world, relations, subjects),
                hops,
            )
    rng.shuffle(questions)
    for i, question in enumerate(questions):
        question["id"] = f"{split}_{i}"
    return [
        {key: q[key] for key in ("id", "question", "golden_answers", "metadata")} for q in questions
    ]


def famous_questions(split):
    """(text, subject, relation) for every wording of every famous fact of a split; a fifth of the
    pairs is dev.
    """
    scratch = World()
    texts = []
    for i, (name, relation) in enumerate(add_famous(scratch)):
        for j, frame in enumerate(FAMOUS_FRAMES):
            for k, noun in enumerate(RELATIONS[relation].nouns):
                if ((i + 2 * j + k) % 5 == 0) == (split == "dev"):
                    wh = "who is" if RELATIONS[relation].object == "person" else "what is"
                    texts.append((frame.format(wh=wh, np=f"the {noun} of {name}"), name, relation))
    random.Random(1).shuffle(texts)
    return texts


def write_jsonl(path, rows):
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_bytes("".join(lines).encode())  # the same bytes on every system


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Make the tiny world.")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="another seed gives another world (default 0, as shipped)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "tinyworld", help="folder to write to"
    )
    parser.add_argument("--deep", action="store_true", help="with questions that need 4 searches")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev"):
        rng = random.Random(f"{args.seed} {split}")
        world = make_world(rng, name_pairs(split), num_hard=HARD_PEOPLE[split])
        numbers = QUESTIONS[split] | (DEEP[split] if args.deep else {})
        questions = make_questions(rng, world, split, numbers)
        corpus = [
            {"id": p["id"], "contents": f'"{p["title"]}"\n{p["text"]}'} for p in world.passages
        ]
        write_jsonl(args.out / f"{split}_corpus.jsonl", corpus)
        write_jsonl(args.out / f"{split}.jsonl", questions)
        print(f"{split}: {len(corpus)} passages, {len(questions)} questions")


if __name__ == "__main__":
    files.run_script("make_tinyworld.py", main)
