"""The prompts of `forerun demo`: four kinds of work that people give to a model, in order of how much drafting helps.

An edit copies most of its prompt, a summary and an extraction copy pieces, a chat copies little. All of it was written
for this file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoPrompt:
    """A user's message and the kind of work that it asks for."""

    kind: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


_CODE_EDIT = '''\
Here is a Python file. Rename the function `load` to `read_readings` everywhere and change nothing else. Answer with the
whole file and no explanation.

```python
import csv
from pathlib import Path


def load(path):
    """Read the station's file and return one dictionary a row."""
    rows = []
    with Path(path).open(newline="") as file:
        for row in csv.DictReader(file):
            row["temperature"] = float(row["temperature"])
            row["humidity"] = float(row["humidity"])
            rows.append(row)
    return rows


def mean(rows, field):
    """The mean of a field over all rows, or None if there are none."""
    values = [row[field] for row in rows]
    return sum(values) / len(values) if values else None


def report(path):
    rows = load(path)
    print("rows:", len(rows))
    print("mean temperature:", mean(rows, "temperature"))
    print("mean humidity:", mean(rows, "humidity"))


if __name__ == "__main__":
    report("readings.csv")
```
'''

_SUMMARY = """\
Summarise the following article in one paragraph of four or five sentences.

The town of Hallen has had a ferry for as long as anyone can remember. The first one was a flat wooden boat that two
men pulled across the river on a rope. It took ten minutes, carried four people or one cow, and did not run when there
was ice. In 1911 the council bought a steam ferry, which held sixty passengers and, on market days, a dozen carts.
When the bridge at Osterby was opened in 1958 most drivers went that way, and the council voted three times on whether
the ferry should be closed. Each time it was kept by a single vote, because the school, the clinic and the bakery
stand on the eastern bank and most of the families live on the western one.

Last year the steam ferry's successor, a diesel boat from 1974, failed its inspection. Repairing it would have cost
almost as much as a new boat. The council asked three yards for offers and chose an electric ferry that is charged at
the eastern landing while passengers board. It crosses the river in four minutes, makes forty crossings a day, and
needs about a third of the money that the diesel boat needed for fuel. The yard promised that the batteries will last
twelve years. The ferry's two pilots, Ingrid Sand and her brother Nils, spent a month learning to steer it. "It is so
quiet that you hear the birds," Ingrid Sand says. "The first week people did not notice that we had left the shore."

Not everyone is content. The electric ferry stops when the wind is stronger than the old boat could bear, and in
January there were six days without a crossing. The council has promised a bus over the Osterby bridge on such days.
Even so, the number of passengers has risen by a fifth since the new boat came, and a second one is to be ordered in
spring.
"""

_CHAT = """\
I have a small balcony that faces east, so it gets sun from early morning until about eleven and is in the shade for the
rest of the day. There is room for three long boxes on the railing and two large pots on the floor. It is windy in
spring. I would like to grow some things that I can eat, and I am away every second weekend, so nothing that dies if it
is not watered for two days in summer. Last year I tried tomatoes and basil. The tomatoes grew tall and thin and gave
four fruits in all, and the basil was eaten by snails within a week, which surprised me on the third floor.

What would you plant in the boxes and in the pots, when should I start, and what did I probably do wrong with the
tomatoes? Please keep it short and practical: I am a beginner and I have no tools except a trowel and a watering can.
"""

_EXTRACTION = """\
Copy the facts of each order in the letter below into a list. Use exactly this form for every order:

- customer: ...
  article: ...
  quantity: ...
  deliver to: ...
  deliver by: ...

Letter:

Dear colleagues, three orders came in by telephone this morning while the system was down, so please enter them by hand.
Marta Lindqvist of the Harbour Bakery wants 40 bags of rye flour, type 1150, delivered to 12 Quay Street, Hallen, by
14 March. The second is from the school kitchen: Mr Tomasz Baran ordered 25 crates of apples, variety Elstar, to be
delivered to 3 Mill Lane, Osterby, by 16 March; he asked us to ring before we come, because the gate is locked until
eight. The third is from Doctor Amina Yusuf of the Eastern Clinic, who needs 6 boxes of oat biscuits without sugar. They
go to 88 River Road, Hallen, and must be there by 12 March at the latest. All three pay by invoice as usual. Thank you,
and sorry for the extra work. Petra
"""

DEMO_PROMPTS = (
    DemoPrompt("code edit", _CODE_EDIT),
    DemoPrompt("extraction", _EXTRACTION),
    DemoPrompt("summary", _SUMMARY),
    DemoPrompt("chat", _CHAT),
)
