// Numbers: found in sorted arrays, put into words, laid out as the ticks of an axis.

/** The first index from `begin` to `end` whose number is greater than `value`: a binary search. */
function firstAbove(numbers, value, begin = 0, end = numbers.length) {
  while (begin < end) {
    const middle = (begin + end) >> 1;
    if (numbers[middle] > value) end = middle;
    else begin = middle + 1;
  }
  return begin;
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), most);
}

/** A number with at most this many significant digits. */
function inWords(number, digits = 5) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e9 || size < 1e-4) return number.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  const rounded = size >= 10 ** digits ? Math.round(number) : Number(number.toPrecision(digits));
  return rounded.toLocaleString("en", { maximumFractionDigits: 8, useGrouping: size >= 1e5 });
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function counted(count, word, plural = `${word}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? word : plural}`;
}

/** The times of the ticks from one time to another: multiples of 1, 2 or 5 times a power of ten. */
function ticksBetween(from, to, most) {
  const rough = (to - from) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [];
  const first = Math.ceil(from / step);
  for (let number = first; number * step <= to && ticks.length <= most + 2; number++) ticks.push(number * step);
  const decimals = clamp(-Math.floor(Math.log10(step) + 1e-9), 0, 12);
  const small = step < 1e-6 || Math.abs(to) >= 1e9;
  return { ticks, word: (tick) => (small ? inWords(tick, 8) : Number(tick.toFixed(decimals)).toString()) };
}
