// Labels in blocks: of blocks with the same style and about the same length, either all have labels or none.

/** How much longer the next block may be than the one before, and the longest than the shortest, in a group. */
const NEXT = 1.1;
const LONGEST = 1.3;

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
      if (!belongs) this.groups.push({ shortest: length(cell), longest: ["", ""] });
      this.groupOf[cell] = this.groups.length - 1;
      widen(this.groups[this.groups.length - 1], timeline.name[cell]);
      before = cell;
    }
  }

  /** Whether all labels of the group of a block fit. */
  fit(canvas, cell) {
    const { layout } = canvas;
    const { shortest, longest } = this.groups[this.groupOf[cell]];
    return layout.bar >= 12 && canvas.widthOf(longest[Number(hasRoomForTwo(layout))]) + 5 <= shortest * layout.scale;
  }
}

/** Keep the longest line of a group, for overlaps with one line and with two; all digits are as wide as 0. */
function widen({ longest }, name) {
  for (const two of [0, 1]) {
    for (const line of linesOf(name, two)) if (line.length > longest[two].length) longest[two] = line.replace(/\d/g, "0");
  }
}

function hasRoomForTwo(layout) {
  return layout.bar >= 28;
}

/** The lines of a label: an overlap has two, if there is room. */
function linesOf(name, two) {
  if (!name.startsWith("(")) return [name];
  const parts = name.slice(1, name.indexOf(")")).split(";");
  return two ? parts : [parts.join(" ")];
}

function drawLabel(canvas, row, style, cell, left, width) {
  const { context, layout } = canvas;
  if (!row.timeline.labels.fit(canvas, cell)) return;
  const lines = linesOf(row.timeline.name[cell], hasRoomForTwo(layout));
  if (lines.some((line) => canvas.widthOf(line) > width - 2)) return; // partly out of view
  context.fillStyle = style.ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  lines.forEach((line, number) => {
    const middle = row.top + layout.bar / 2 + 13 * (number - (lines.length - 1) / 2) + 0.5;
    context.fillText(line, left + (width - 1) / 2, middle);
  });
  canvas.drawn.labels++;
}
