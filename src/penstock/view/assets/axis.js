// Draws what is around the rows: the time axis with its grid, the names of the ranks, titles, and the time at the pointer.

function drawGrid({ context, layout, brushes }, ticks) {
  context.strokeStyle = brushes.grid;
  context.lineWidth = 1;
  context.beginPath();
  for (const tick of ticks) {
    const x = Math.round(layout.x(tick)) + 0.5;
    context.moveTo(x, AXIS);
    context.lineTo(x, layout.height);
  }
  context.stroke();
}

function drawAxis({ context, layout, brushes }, { ticks, word }) {
  context.fillStyle = brushes.paper;
  context.fillRect(0, 0, layout.width, AXIS);
  context.strokeStyle = brushes.line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, AXIS - 0.5);
  context.lineTo(layout.width, AXIS - 0.5);
  for (const tick of ticks) {
    const x = Math.round(layout.x(tick)) + 0.5;
    context.moveTo(x, AXIS - 6);
    context.lineTo(x, AXIS);
  }
  context.stroke();
  context.font = `11.5px ${FONT}`;
  context.fillStyle = brushes.muted;
  context.textBaseline = "alphabetic";
  context.textAlign = "right";
  context.fillText("time", layout.left - 14, AXIS - 11);
  context.textAlign = "center";
  for (const tick of ticks) {
    const label = word(tick);
    const half = context.measureText(label).width / 2;
    const x = layout.x(tick);
    if (x - half >= layout.left - 10 && x + half <= layout.width - 2) context.fillText(label, x, AXIS - 11);
  }
}

const NAME_FONT = `12px ${FONT}`;
const PEAK_FONT = `10.5px ${FONT}`;

function peakWords(peak) {
  return `peak ${inWords(peak, 4)}`;
}

/** How wide the names of the ranks and their peaks are. */
function widestName(context, timelines) {
  const widthIn = (font, texts) => {
    context.font = font;
    return Math.max(0, ...[...new Set(texts)].map((text) => context.measureText(text).width));
  };
  const ranks = Math.max(...timelines.map((timeline) => timeline.ranks));
  return Math.max(widthIn(NAME_FONT, [`rank ${ranks - 1}`]), widthIn(PEAK_FONT, timelines.flatMap((timeline) => timeline.peaks.map(peakWords))));
}

/** The names of the ranks, and under each its peak memory. */
function drawNames({ context, layout, brushes, scrolled }, rows, limit) {
  context.fillStyle = brushes.paper;
  context.fillRect(0, scrolled, layout.left - 4, layout.height);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const row of rows) {
    context.font = NAME_FONT;
    context.fillStyle = brushes.ink;
    context.fillText(`rank ${row.rank}`, layout.left - 14, row.top + layout.bar / 2 + 0.5);
    if (!layout.memory) continue;
    const peak = row.timeline.peaks[row.rank];
    context.font = PEAK_FONT;
    context.fillStyle = limit !== null && peak > limit ? brushes.warning : brushes.muted;
    context.fillText(peakWords(peak), layout.left - 14, row.curve + layout.curve / 2 + 0.5);
  }
}

function drawTitles({ context, layout, brushes }) {
  const left = layout.width < 640 ? 12 : 16;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  for (const { timeline, top } of layout.titles) {
    context.fillStyle = brushes.paper;
    context.fillRect(0, top, layout.width, TITLE - 8);
    context.font = `600 13px ${FONT}`;
    context.fillStyle = brushes.ink;
    const title = shortened(context, timeline.title, layout.width - 240);
    context.fillText(title, left, top + 20);
    const right = left + context.measureText(title).width;
    context.font = `12px ${FONT}`;
    context.fillStyle = brushes.muted;
    context.fillText(`makespan ${inWords(timeline.makespan)}, bubble ${percent(timeline.bubbleRate)}`, right + 12, top + 20);
  }
}

function shortened(context, text, width) {
  let kept = text;
  while (kept.length > 1 && context.measureText(kept).width > width) kept = kept.slice(0, Math.floor(kept.length * 0.9));
  return kept === text ? text : `${kept}…`;
}

/** Where each timeline ends. */
function drawEnds({ context, layout, brushes }) {
  context.strokeStyle = brushes.muted;
  context.lineWidth = 1;
  context.setLineDash([2, 3]);
  context.beginPath();
  for (const timeline of layout.timelines) {
    const x = Math.round(layout.x(timeline.makespan)) + 0.5;
    const first = layout.rowOf(timeline, 0);
    context.moveTo(x, first.top - 4);
    context.lineTo(x, first.top + timeline.ranks * layout.pitch - GAP + 4);
  }
  context.stroke();
  context.setLineDash([]);
}

function drawPointer({ context, layout, brushes }, x) {
  if (x < layout.left || x > layout.right + 20) return;
  context.strokeStyle = brushes.muted;
  context.globalAlpha = 0.5;
  context.beginPath();
  context.moveTo(Math.round(x) + 0.5, AXIS);
  context.lineTo(Math.round(x) + 0.5, layout.height);
  context.stroke();
  context.globalAlpha = 1;
  const label = inWords(Math.max(layout.time(x), 0), 6);
  context.font = `600 11.5px ${FONT}`;
  const width = context.measureText(label).width + 12;
  const left = clamp(x - width / 2, 0, layout.width - width);
  context.fillStyle = brushes.paper;
  context.fillRect(left - 22, 2, width + 44, 21);
  context.fillStyle = brushes.ink;
  context.beginPath();
  context.roundRect(left, 4, width, 19, 4);
  context.fill();
  context.fillStyle = brushes.paper;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(label, left + width / 2, 14);
}
