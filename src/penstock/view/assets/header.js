// The header: the title, a table of figures with a row for each timeline, and the legend.

/** What each figure means. */
const FIGURES = {
  makespan: "from the start of the first action to the end of the last",
  span: "the longest time from the first action of a rank to its last",
  bubble: "how much longer the run takes than the busiest rank works: (makespan - its busy time) / makespan",
  "peak memory": "the most memory that a rank holds at any time",
  idle: "how long ranks run nothing, summed over all ranks, and its share of the time of all ranks (makespan * ranks); it is more than the bubble if some ranks have less to do than the busiest",
};

/** What each cause of idle time means. */
const MEANINGS = {
  activation: "another rank has not computed the activation yet",
  gradient: "another rank has not computed the gradient yet",
  unsent: "another rank has computed the tensor, but not sent it yet",
  lane: "the lane of the transfer is busy",
  transfer: "the tensor is in flight",
  order: "something later in the rank's own order could run",
  dispatch: "the rank takes time to start the action",
  sends: "what the rank has sent has not been received yet",
  step: "the previous step has not ended everywhere",
  drained: "the rank has run its last action",
};

function fillHeader(page) {
  const { timelines } = page;
  const title = timelines.map((timeline) => timeline.title).join(", ");
  document.title = `${title}: timeline`;
  Object.assign(document.getElementById("title"), { textContent: title, title });
  fillFigures(page);
  fillLegend(page);
  fillHelp(page);
}

/** What the pointer learns from titles is also in the help. */
function fillHelp({ causes }) {
  const explained = (term, meaning) => element("div", {}, element("dt", {}, ...term), element("dd", {}, meaning));
  document.getElementById("meanings").append(...Object.entries(FIGURES).map(([word, meaning]) => explained([word], meaning)));
  document.getElementById("hatches").append(...causes.map((cause) => explained([sampleOf(cause), ` ${cause}`], MEANINGS[cause])));
}

/** A row for each timeline; the causes of idle time are columns if there are several timelines, otherwise a separate line. */
function fillFigures({ timelines, causes, limit }) {
  const sums = timelines.map((timeline) => timeline.idleByCause(causes));
  const shown = causes.map((_, number) => number).filter((number) => sums.some((sum) => sum[number] > 0));
  const columns = timelines.length > 1 ? shown : [];
  const common = timelines.length > 1 ? sizesOf(timelines[0]).filter((size) => timelines.every((timeline) => sizesOf(timeline).includes(size))) : [];
  const head = element("tr", {}, element("th", { scope: "col" }, "schedule", element("small", {}, common.join(", "))));
  for (const [word, meaning] of Object.entries(FIGURES)) head.append(element("th", { scope: "col", title: meaning }, word));
  for (const number of columns) head.append(element("th", { scope: "col", title: MEANINGS[causes[number]] }, sampleOf(causes[number]), causes[number]));
  const body = element("tbody");
  timelines.forEach((timeline, number) => {
    const row = figuresOf(timeline, limit, common);
    const [sum, share] = idleWords(timeline, sums[number].reduce((all, time) => all + time, 0));
    row.append(element("td", { title: FIGURES.idle }, sum, element("small", {}, share)));
    for (const cause of columns) row.append(causeFigure(timeline, sums[number][cause]));
    body.append(row);
  });
  const figures = document.getElementById("figures");
  figures.replaceChildren(element("thead", {}, head), body);
  figures.className = timelines.length > 1 ? "several" : "single";
  if (timelines.length > 1) return;
  // In a narrow window the figures of a single timeline wrap, each with its own label.
  [...body.rows[0].cells].forEach((cell, place) => cell.setAttribute("data-label", head.cells[place].textContent));
  fillCauses(timelines[0], causes, shown, sums[0]);
}

function fillCauses(timeline, causes, shown, sums) {
  const list = document.getElementById("causes");
  if (shown.length) list.append(element("li", {}, "idle:"));
  for (const number of shown) {
    const [sum, share] = idleWords(timeline, sums[number]);
    const meaning = MEANINGS[causes[number]];
    const item = { title: meaning, "aria-label": `${causes[number]}: ${meaning}; ${sum}, ${share}` };
    list.append(element("li", item, sampleOf(causes[number]), causes[number], element("b", {}, sum), share));
  }
}

function sampleOf(cause) {
  return element("canvas", { class: "swatch", "data-cause": cause, "aria-hidden": "true" });
}

function causeFigure(timeline, time) {
  const [sum, share] = idleWords(timeline, time);
  return element("td", { title: `${share} of the time of all ranks` }, sum);
}

/** How long all ranks together are idle, and the share of their total time. */
function idleWords(timeline, sum) {
  const whole = timeline.makespan * timeline.ranks;
  return [inWords(sum), percent(whole ? sum / whole : 0)];
}

function sizesOf({ ranks, stages, microbatches, steps }) {
  const sizes = [counted(ranks, "rank"), counted(stages, "stage"), counted(microbatches, "microbatch", "microbatches")];
  return steps > 1 ? [...sizes, counted(steps, "step")] : sizes;
}

/** The figures of a timeline, without the sizes that all timelines have in common. */
function figuresOf(timeline, limit, common) {
  const sizes = sizesOf(timeline);
  const own = sizes.filter((size) => !common.includes(size));
  const peak = Math.max(...timeline.peaks);
  const over = limit !== null && peak > limit;
  const where = over ? `over ${inWords(limit)}` : `on rank ${timeline.peaks.indexOf(peak)}`;
  return element(
    "tr", {},
    element("th", { scope: "row" }, element("span", { title: `${timeline.title}: ${sizes.join(", ")}` }, timeline.title), element("small", {}, own.join(", "))),
    element("td", {}, inWords(timeline.makespan)),
    element("td", {}, inWords(timeline.span)),
    element("td", { title: `${FIGURES.bubble}; of the span: ${percent(timeline.spanBubbleRate)}` }, percent(timeline.bubbleRate)),
    element("td", { class: over ? "over" : "" }, inWords(peak), element("small", {}, where)),
  );
}

function fillLegend({ timelines, styles, limit }) {
  const legend = document.getElementById("legend");
  const used = new Set(timelines.flatMap((timeline) => [...new Set(timeline.style.filter((_, cell) => !timeline.posted[cell]))]));
  styles.forEach(({ name, meaning, colour }, number) => {
    if (!used.has(number)) return;
    const label = name.length > 1 ? meaning : element("span", {}, element("b", {}, name), ` ${meaning}`);
    legend.append(element("li", {}, swatch(colour), label));
  });
  if (timelines.some((timeline) => timeline.transfers.start.length)) {
    legend.append(element("li", {}, swatch("var(--forward)", "stroke"), "activation sent"));
    legend.append(element("li", {}, swatch("var(--backward)", "stroke"), "gradient sent"));
  }
  legend.append(element("li", {}, swatch("var(--critical)", "box"), "critical path"));
  if (limit !== null) legend.append(element("li", {}, swatch("var(--warning)", "stroke"), `memory limit ${inWords(limit)}`));
}

/** Paint the samples of the hatches as they are painted in the rows. */
function paintSamples(brushes, density) {
  for (const sample of document.querySelectorAll("canvas.swatch")) {
    sample.width = 16 * density;
    sample.height = 11 * density;
    const context = sample.getContext("2d");
    context.scale(density, density);
    context.fillStyle = brushes.patterns[brushes.causes.indexOf(sample.dataset.cause)];
    context.fillRect(0, 0, 16, 11);
  }
}
