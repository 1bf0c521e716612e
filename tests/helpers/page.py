"""Looking at HTML."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Checks that elements close in order; collects ids, what would be fetched, and text."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})
    FETCHES = frozenset({"src", "href", "srcset", "data", "poster", "action", "xlink:href"})

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.fetched, self.elements, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self.fetched += [
            value
            for name, value in attributes
            if name in self.FETCHES and not value.startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data.replace("\xa0", " ")
