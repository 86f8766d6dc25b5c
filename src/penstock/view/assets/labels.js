// Labels in blocks: of blocks with the same style and about the same length, all have the same kind of label: the name of
// the action; where that is too long, the number of the microbatch, since the colour shows the type; or none.

/** How much longer the next block may be than the one before, and the longest than the shortest, in a group. */
const NEXT = 1.1;
const LONGEST = 1.3;

/** The kind of label that is only the number of the microbatch. */
const SHORT = 2;

/** The blocks of a timeline in groups with the same style and about the same length. */
class Labels {
  constructor(timeline) {
    this.groups = [];
    this.groupOf = new Int32Array(timeline.count);
    const blocks = timeline.rows.flatMap(({ blocks: { cell } }) => [...cell]);
    const length = (cell) => timeline.end[cell] - timeline.start[cell];
    blocks.sort((one, other) => timeline.style[one] - timeline.style[other] || length(one) - length(other));
    let before = -1;
    for (const cell of blocks) {
      const group = this.groups[this.groups.length - 1];
      const belongs = group && timeline.style[cell] === timeline.style[before] && length(cell) <= Math.min(NEXT * length(before), LONGEST * group.shortest);
      if (!belongs) this.groups.push({ shortest: length(cell), longest: ["", "", ""] });
      this.groupOf[cell] = this.groups.length - 1;
      widen(this.groups[this.groups.length - 1], timeline.name[cell]);
      before = cell;
    }
  }

  /** The lines of the label of a block: of the longest kind that fits into all blocks of its group; [] if none does. */
  of(canvas, cell, name) {
    const { layout } = canvas;
    const { shortest, longest } = this.groups[this.groupOf[cell]];
    if (layout.bar < 12) return [];
    const full = Number(hasRoomForTwo(layout));
    const kind = [full, SHORT].find((one) => canvas.widthOf(longest[one]) + (one === SHORT ? 3 : 5) <= shortest * layout.scale);
    return kind === undefined ? [] : linesOf(name, kind);
  }
}

/** Keep the longest line of a group, for each kind of label; all digits are as wide as 0. */
function widen({ longest }, name) {
  for (const kind of [0, 1, SHORT]) {
    for (const line of linesOf(name, kind)) if (line.length > longest[kind].length) longest[kind] = line.replace(/\d/g, "0");
  }
}

function hasRoomForTwo(layout) {
  return layout.bar >= 28;
}

/** The lines of a kind of label: 0 for one line, 1 for overlaps in two lines, `SHORT` for microbatches only. */
function linesOf(name, kind) {
  const parts = name.startsWith("(") ? name.slice(1, name.indexOf(")")).split(";") : [name];
  if (kind === SHORT) return [parts.map((part) => part.match(/\d*$/)[0]).join("+")];
  return kind ? parts : [parts.join(" ")];
}

function drawLabel(canvas, row, style, cell, left, width) {
  const { context, layout } = canvas;
  const lines = row.timeline.labels.of(canvas, cell, row.timeline.name[cell]);
  if (!lines.length || lines.some((line) => canvas.widthOf(line) > width - 2)) return; // partly out of view
  context.fillStyle = style.ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  lines.forEach((line, number) => {
    const middle = row.top + layout.bar / 2 + 13 * (number - (lines.length - 1) / 2) + 0.5;
    context.fillText(line, left + (width - 1) / 2, middle);
  });
  canvas.drawn.labels++;
}
