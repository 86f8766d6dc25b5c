// Mouse, touch and keys: each changes the view and asks for a new frame.

const KEYS = {
  ArrowLeft: (page) => page.pan(-0.1),
  ArrowRight: (page) => page.pan(0.1),
  Enter: (page) => page.focus.enter(),
  ArrowUp: (page) => page.scroll(-60),
  ArrowDown: (page) => page.scroll(60),
  "+": (page) => page.zoom(1.5),
  "=": (page) => page.zoom(1.5),
  "-": (page) => page.zoom(1 / 1.5),
  0: (page) => page.fit(),
  Home: (page) => page.fit(),
  c: (page) => page.toggle("critical"),
  t: (page) => page.toggle("transfers"),
  m: (page) => page.toggle("memory"),
  d: (page) => page.toggle("dark"),
  n: (page) => page.selectNext(1),
  p: (page) => page.selectNext(-1),
  Escape: (page) => page.clear(),
  "?": () => document.getElementById("keys").showModal(),
};

const BUTTONS = {
  "zoom-in": KEYS["+"],
  "zoom-out": KEYS["-"],
  fit: KEYS.Home,
  critical: KEYS.c,
  transfers: KEYS.t,
  memory: KEYS.m,
  theme: KEYS.d,
  help: KEYS["?"],
};

function listen(page) {
  for (const [name, act] of Object.entries(BUTTONS)) document.getElementById(name).addEventListener("click", () => press(page, act));
  window.addEventListener("keydown", (event) => pressKey(page, event));
  page.canvas.addEventListener("wheel", (event) => turnWheel(page, event), { passive: false });
  listenToPointers(page);
  page.stage.addEventListener("scroll", () => page.ask());
  new ResizeObserver(() => page.resize()).observe(page.stage);
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  page.setDark(prefersDark.matches);
  prefersDark.addEventListener("change", () => page.setDark(prefersDark.matches));
}

function pressKey(page, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  const act = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (page.focus.pressKey(event)) return;
  const focused = document.activeElement;
  if (!act || (focused.matches(".facts") && event.key.startsWith("Arrow"))) return;
  if (event.key === "Enter" && focused !== page.stage) return;
  event.preventDefault();
  press(page, act);
}

function press(page, act) {
  page.closeTooltip();
  act(page);
}

function turnWheel(page, event) {
  const { layout } = page;
  if (event.offsetX < layout.left - 4 && !event.ctrlKey) return; // over the names of the ranks, the wheel scrolls
  event.preventDefault();
  const unit = [1, 16, 400][event.deltaMode];
  const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
  if (sideways) layout.pan((sideways * unit) / layout.scale);
  if (!event.shiftKey) layout.zoom(Math.exp(-clamp(event.deltaY * unit, -300, 300) * 0.002), layout.time(event.offsetX));
  page.point(event);
  page.ask();
}

function listenToPointers(page) {
  const { canvas } = page;
  const down = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button > 0) return;
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, event);
    if (down.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (before) {
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (down.size === 1 && moved > 4) drag(page, before, event);
      if (down.size === 2) pinch(page, before, event, [...down.values()].find((other) => other !== before));
      if (moved > 4 || down.size > 1) down.set(event.pointerId, event);
    }
    page.point(event);
    page.ask();
  });
  const release = (event) => {
    if (down.delete(event.pointerId) && event.type === "pointerup" && moved <= 4) page.click();
    if (!down.size) canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => page.leave());
}

function drag(page, before, event) {
  page.canvas.classList.add("dragging");
  page.layout.pan((before.clientX - event.clientX) / page.layout.scale);
  page.stage.scrollTop += before.clientY - event.clientY;
}

/** Zoom with two fingers: what is between them stays there. */
function pinch({ layout, canvas }, before, event, other) {
  const left = canvas.getBoundingClientRect().left;
  const spread = (one) => Math.max(Math.abs(one.clientX - other.clientX), 12);
  layout.zoom(spread(event) / spread(before), layout.time((event.clientX + other.clientX) / 2 - left));
}
