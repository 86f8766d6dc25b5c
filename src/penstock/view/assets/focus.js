// The focus: an item of the timeline that keys move and screen readers read, with all that a pointer can be at.

/** What a rank has, from top to bottom: its own time, its transfers, and its memory. */
const LANES = ["time", "transfers", "memory"];

/** One element is enough for any number of items: it takes the place, the name and the focus of the current one. */
class Focus {
  constructor(page) {
    this.page = page;
    this.item = null;
    this.holder = document.getElementById("items");
    this.holder.addEventListener("focusout", () => requestAnimationFrame(() => this.leaveIfGone()));
  }

  /** Go to an item, or with Enter on an item do what a click does. */
  enter() {
    if (this.item) return this.click();
    const { selected, timelines } = this.page;
    const timeline = selected?.timeline ?? timelines[0];
    return this.go(timeline, selected ? timeline.rank[selected.cell] : 0, "time", selected ? timeline.start[selected.cell] : 0);
  }

  click() {
    if (this.item.kind === "action") this.page.select(this.item.timeline, this.item.cell);
    else this.page.clear();
  }

  /** Whether the focus takes a key. */
  pressKey(event) {
    if (!this.item || !this.holder.contains(document.activeElement)) return false;
    const acts = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      ArrowUp: () => this.change(-1),
      ArrowDown: () => this.change(1),
      Home: () => this.show(0),
      End: () => this.show(this.items.length - 1),
      Enter: () => this.click(),
      " ": () => this.click(),
      "+": () => this.zoom(1.5),
      "=": () => this.zoom(1.5),
      "-": () => this.zoom(1 / 1.5),
      Escape: () => this.leave(),
    };
    const act = event.shiftKey && event.key.startsWith("Arrow") ? null : acts[event.key];
    if (!act) return false;
    event.preventDefault();
    act();
    return true;
  }

  /** Go to what a lane of a rank has at a time. */
  go(timeline, rank, lane, time) {
    Object.assign(this, { timeline, rank, lane, items: itemsOf(timeline, rank, lane) });
    const after = this.items.findIndex((item) => item.start > time);
    this.show(Math.max((after < 0 ? this.items.length : after) - 1, 0));
  }

  step(direction) {
    this.show(clamp(this.number + direction, 0, this.items.length - 1));
  }

  /** Go to the next lane up or down that has anything, at the same time. */
  change(direction) {
    const { page, item } = this;
    const { shown } = page;
    const lanes = page.layout.rows.flatMap(({ timeline, rank }) => LANES.map((lane) => ({ timeline, rank, lane })));
    let place = lanes.findIndex((one) => one.timeline === this.timeline && one.rank === this.rank && one.lane === this.lane);
    do place += direction;
    while (lanes[place] && ((lanes[place].lane !== "time" && !shown[lanes[place].lane]) || !itemsOf(lanes[place].timeline, lanes[place].rank, lanes[place].lane).length));
    if (lanes[place]) this.go(lanes[place].timeline, lanes[place].rank, lanes[place].lane, item.start);
  }

  show(number) {
    this.number = number;
    this.item = this.items[number];
    this.moveIntoView();
    const description = DESCRIPTIONS[this.item.kind](this.item, this.page);
    const cell = element("div", { role: "gridcell", tabindex: "0", "aria-label": spoken(description) });
    const title = this.page.timelines.length > 1 ? `${this.timeline.title}, ` : "";
    const row = element("div", { role: "row", "aria-label": `${title}rank ${this.rank}, ${this.lane}` }, cell);
    this.holder.replaceChildren(row); // a new element, or screen readers would stay silent
    this.place();
    cell.focus({ preventScroll: true });
    const { left, bottom } = cell.getBoundingClientRect();
    showTooltip(this.page.tooltip, description, clamp(left, 0, window.innerWidth), bottom - 10);
    this.page.ask();
  }

  zoom(factor) {
    this.page.layout.zoom(factor, (this.item.start + this.item.end) / 2);
    this.show(this.number);
  }

  moveIntoView() {
    const { layout, stage } = this.page;
    const { start, end } = this.item;
    if (start < layout.from || end > layout.to) layout.pan((start + end) / 2 - (layout.from + layout.to) / 2);
    const { top } = layout.rowOf(this.timeline, this.rank);
    const space = stage.clientHeight;
    if (top - AXIS - 8 < stage.scrollTop) stage.scrollTop = top - AXIS - 8;
    else if (top + layout.pitch > stage.scrollTop + space) stage.scrollTop = top + layout.pitch - space;
  }

  /** Put the element where its item is drawn now. */
  place() {
    const cell = this.holder.querySelector("[role=gridcell]");
    if (!cell || !this.item) return;
    const { layout } = this.page;
    const row = layout.rowOf(this.timeline, this.rank);
    const left = clamp(layout.x(this.item.start), layout.left - 4, layout.width);
    const right = clamp(layout.x(this.item.end), left, layout.width);
    const isCurve = this.lane === "memory";
    Object.assign(cell.style, {
      left: `${left - (right - left < 6 ? 3 : 0)}px`,
      width: `${Math.max(right - left, 6)}px`,
      top: `${isCurve ? row.curve : row.top}px`,
      height: `${isCurve ? layout.curve : layout.bar}px`,
    });
  }

  leave() {
    this.leaveIfGone(true);
    this.page.stage.focus({ preventScroll: true });
  }

  leaveIfGone(always = false) {
    if (!this.item || (!always && this.holder.contains(document.activeElement))) return;
    this.item = null;
    this.holder.replaceChildren();
    this.page.closeTooltip();
    this.page.ask();
  }
}

/** All that a lane of a rank has, in order of time. */
function itemsOf(timeline, rank, lane) {
  const found = [];
  if (lane === "time") {
    const { blocks, marks } = timeline.rows[rank];
    for (const { cell, start, end } of [blocks, marks]) cell.forEach((one, place) => found.push({ kind: "action", timeline, rank, cell: one, start: start[place], end: end[place] }));
    const { first, start, end } = timeline.waits;
    for (let wait = first[rank]; wait < first[rank + 1]; wait++) found.push({ kind: "wait", timeline, rank, wait, start: start[wait], end: end[wait] });
  } else if (lane === "transfers") {
    const { source, target, start, end } = timeline.transfers;
    source.forEach((one, transfer) => {
      if (one === rank || target[transfer] === rank) found.push({ kind: "transfer", timeline, rank, transfer, start: start[transfer], end: end[transfer] });
    });
  } else {
    const { time } = timeline.memory[rank];
    time.forEach((one, place) => found.push({ kind: "memory", timeline, rank, time: one, start: one, end: time[place + 1] ?? timeline.makespan }));
  }
  return found.sort((one, other) => one.start - other.start || one.end - other.end);
}

/** A description as a sentence. */
function spoken({ heading, aside, rows }) {
  return [aside ? `${heading}, ${aside}` : heading, ...rows.map(([word, text]) => `${word} ${text}`)].join("; ");
}
