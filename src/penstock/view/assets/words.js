// Describes what is under the pointer. Everything is put into the page as text, never as markup.

/** Create an element with attributes, and with texts or other elements in it. */
function element(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}

function swatch(colour, kind = "") {
  const made = element("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
  made.style[kind === "box" ? "borderColor" : "background"] = colour;
  return made;
}

/** For everything that a pointer can be at: a heading, a swatch, and rows of two texts. */
const DESCRIPTIONS = {
  action({ timeline, cell }, { styles }) {
    const rank = timeline.rank[cell];
    const style = styles[timeline.style[cell]];
    const rows = [["rank", `${rank}`]];
    if (timeline.step) rows.push(["step", `${timeline.step[cell]}`]);
    rows.push(["start", inWords(timeline.start[cell], 8)], ["end", inWords(timeline.end[cell], 8)]);
    rows.push(["duration", inWords(timeline.end[cell] - timeline.start[cell], 8)]);
    rows.push(["memory then", inWords(timeline.memoryAt(rank, timeline.start[cell]))]);
    rows.push(...waitedFor(timeline, cell));
    return { heading: timeline.name[cell], aside: style.meaning, colour: style.colour, rows };
  },
  wait({ timeline, wait, rank }, { causes, brushes }) {
    const { start, end, cause, why } = timeline.waits;
    const rows = [["rank", `${rank}`], ["from", inWords(start[wait], 8)], ["to", inWords(end[wait], 8)]];
    rows.push(["duration", inWords(end[wait] - start[wait], 8)], ["why", why[wait]]);
    return { heading: "idle", aside: causes[cause[wait]], colour: brushes.waits[cause[wait]], rows };
  },
  memory({ timeline, rank, time }, { limit, brushes }) {
    const rows = [["rank", `${rank}`], ["time", inWords(time, 6)], ["held", inWords(timeline.memoryAt(rank, time))]];
    rows.push(["peak", inWords(timeline.peaks[rank])]);
    if (limit !== null) rows.push(["limit", inWords(limit)]);
    return { heading: "memory", aside: "", colour: brushes.held, rows };
  },
  transfer({ timeline, transfer }, { brushes }) {
    const { source, target, start, end, forward, name } = timeline.transfers;
    const rows = [["from", `rank ${source[transfer]}`], ["to", `rank ${target[transfer]}`]];
    rows.push(["sent", inWords(start[transfer], 8)], ["arrives", inWords(end[transfer], 8)]);
    rows.push(["duration", inWords(end[transfer] - start[transfer], 8)]);
    const colour = forward[transfer] ? brushes.forward : brushes.backward;
    return { heading: name[transfer], aside: forward[transfer] ? "activation" : "gradient", colour, rows };
  },
};

/** What an action waited for: the idle intervals before it, or the action that it directly follows. */
function waitedFor(timeline, cell) {
  const waits = timeline.waitsBefore(cell);
  if (waits.length) {
    const { start, end, why } = timeline.waits;
    return waits.map((wait) => [`waited ${inWords(end[wait] - start[wait])}`, why[wait]]);
  }
  const before = timeline.awaited(cell);
  return [["waited", before < 0 ? "for nothing" : `not at all: it follows ${timeline.name[before]} on rank ${timeline.rank[before]}`]];
}

/** Show a description next to the pointer, on the side where there is room. */
function showTooltip(tooltip, description, x, y) {
  const { heading, aside, colour, rows } = description;
  const title = element("strong", {}, swatch(colour), element("span", {}, heading));
  const list = element("dl");
  if (aside) list.append(element("dt", {}, "what"), element("dd", {}, aside));
  for (const [word, text] of rows) list.append(element("dt", {}, word), element("dd", {}, text));
  tooltip.replaceChildren(title, list);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = x + 16 + width > window.innerWidth - 8 ? x - 16 - width : x + 16;
  const top = y + 18 + height > window.innerHeight - 8 ? y - 12 - height : y + 18;
  tooltip.style.transform = `translate(${Math.round(clamp(left, 8, window.innerWidth - width - 8))}px, ${Math.round(Math.max(top, 8))}px)`;
}

/** The line at the bottom: what is highlighted. */
function statusWords({ selected, critical }, timelines) {
  const said = [];
  if (selected) {
    const { timeline, cell, chain, dependents } = selected;
    const title = timelines.length > 1 ? ` of ${timeline.title}` : "";
    const runs = chain.filter((other) => !timeline.posted[other]).length;
    said.push(`${timeline.name[cell]} on rank ${timeline.rank[cell]}${title}: it follows ${counted(runs - 1, "action")} back to the start`);
    said.push(dependents.length ? `waiting for it: ${dependents.map((other) => timeline.name[other]).join(", ")}` : "nothing waits for it");
  } else if (critical) {
    said.push("Critical path: the chain of actions that determines the makespan");
  }
  return said.length ? `${said.join("; ")}.` : "Wheel to zoom, drag to pan, click an action for its chain; Enter to go through it by keys, ? for all keys.";
}
